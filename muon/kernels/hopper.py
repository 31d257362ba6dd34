"""The 16-bit products of Newton-Schulz for Hopper in Gluon: warp-specialised, persistent, epilogues hidden.

A program has three roles. One warp copies tiles of both operands into a ring in shared memory. Two groups of four warps
take turns (ping-pong): while one multiplies what arrives for its tile of the result, the other finishes its own: scales
it, adds the terms and writes it, mirrored too if the product is symmetric. So the tensor cores never wait for an
epilogue, which a grid of plain programs can't have: those that share a processor finish at the same time.

The portable twins are in ``products.py``; the torch twin is ``muon.newton_schulz.TorchOperations``.
"""

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from muon.kernels.products import triangle_tile

# Names that Triton 3.6 has otherwise than its successors.
load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

BLOCK = gl.constexpr(128)  # side of a tile of the result
BLOCK_K = gl.constexpr(64)
STAGES = gl.constexpr(5)  # of the ring; with the two tiles of results all of the 227 KB of shared memory
GROUP = gl.constexpr(8)  # tile rows that go through the columns together


@gluon.jit
def _place(t, rows, cols, SYMMETRIC: gl.constexpr):
    """Batch, row and column of tile t: of a lower triangle of tiles, or of all."""
    if SYMMETRIC:
        tiles = rows * (rows + 1) // 2
        i, j = triangle_tile(t % tiles, rows, GROUP)
    else:
        tiles = rows * cols
        top = t % tiles // (GROUP * cols) * GROUP
        height = gl.minimum(GROUP, rows - top)
        rest = t % tiles % (GROUP * cols)
        i, j = top + rest % height, rest // height
    return t // tiles, i * BLOCK, j * BLOCK


@gluon.jit
def _copy_operands(a_desc, b_desc, a_ring, b_ring, full, empty, tiles, rows, cols, depth, SYMMETRIC: gl.constexpr):
    step = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, row, col = _place(t, rows, cols, SYMMETRIC)
        for k in range(depth):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            load(a_desc, [batch, row, k * BLOCK_K], full.index(stage), a_ring.index(stage))
            b_place = [batch, col, k * BLOCK_K] if SYMMETRIC else [batch, k * BLOCK_K, col]
            load(b_desc, b_place, full.index(stage), b_ring.index(stage))
            step += 1


@gluon.jit
def _multiply(
    c_desc, d_desc, out_desc, a_ring, b_ring, tile, full, empty, turn, other_turn, term_ready,
    alpha, beta, gamma, tiles, rows, cols, depth,
    WHICH: gl.constexpr, TERMS: gl.constexpr, SYMMETRIC: gl.constexpr, SYMMETRIZE: gl.constexpr,
):  # fmt: skip
    """Every second tile of the program's: the even ones if WHICH is 0, the odd ones if it is 1."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    matrix = tile.reshape([BLOCK, BLOCK])
    first = gl.program_id(0) + WHICH * gl.num_programs(0)
    for count in range(gl.cdiv(tiles - first, 2 * gl.num_programs(0))):
        batch, row, col = _place(first + 2 * count * gl.num_programs(0), rows, cols, SYMMETRIC)
        tma.store_wait(0)  # the last result has left the tile
        if TERMS >= 1:
            barrier()
            mbarrier.expect(term_ready, c_desc.block_type.nbytes)
            load(c_desc, [batch, row, col], term_ready, tile)

        # Taking turns also keeps a group from waiting for a stage two rounds ahead, which has the parity of this one.
        mbarrier.wait(turn, (count & 1) ^ (1 - WHICH))
        acc = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
        step = (2 * count + WHICH) * depth
        for k in range(depth):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1, deps=[a_ring, b_ring])
            a = a_ring.index(stage).reshape([BLOCK, BLOCK_K])
            if SYMMETRIC:
                b = b_ring.index(stage).reshape([BLOCK, BLOCK_K]).permute((1, 0))
            else:
                b = b_ring.index(stage).reshape([BLOCK_K, BLOCK])
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            if k > 0:
                barrier()  # every warp has finished the step before this one
                mbarrier.arrive(empty.index((step - 1) % STAGES))
            step += 1
        barrier()
        mbarrier.arrive(other_turn)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index((step - 1) % STAGES))

        acc *= alpha
        if TERMS >= 1:
            mbarrier.wait(term_ready, TERMS * count & 1, deps=[tile])
            acc += beta * matrix.load(layout).to(gl.float32)
        if TERMS >= 2:
            barrier()
            mbarrier.expect(term_ready, d_desc.block_type.nbytes)
            load(d_desc, [batch, row, col], term_ready, tile)
            mbarrier.wait(term_ready, 1, deps=[tile])
            acc += gamma * matrix.load(layout).to(gl.float32)
        out = acc.to(out_desc.dtype)
        write(matrix, out)
        if SYMMETRIC and row == col:
            if SYMMETRIZE:
                _mirror_in_place(matrix)
            store(out_desc, [batch, row, col], tile)
        else:
            store(out_desc, [batch, row, col], tile)
            if SYMMETRIC:
                tma.store_wait(0)
                write(matrix.permute((1, 0)), out)
                store(out_desc, [batch, col, row], tile)
    tma.store_wait(0)


@gluon.jit
def _mirror_in_place(matrix):
    """Above the diagonal what is below; in two halves, because of the registers."""
    HALF: gl.constexpr = BLOCK // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    offs_i = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    offs_j = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    for start in gl.static_range(0, BLOCK, HALF):
        columns = matrix.slice(start, HALF, dim=1)
        mirrored = matrix.slice(start, HALF).permute((1, 0)).load(layout)
        is_lower = offs_i[:, None] >= start + offs_j[None, :]
        write(columns, gl.where(is_lower, columns.load(layout), mirrored))


@gluon.jit
def write(matrix, values):
    """Values to shared memory, once nobody reads it any more, and visible to the copy engine."""
    barrier()
    matrix.store(values)
    fence_async_shared()
    barrier()


@gluon.jit(do_not_specialize=["tiles", "rows", "cols", "depth"])
def product_kernel(
    a_desc, b_desc, c_desc, d_desc, out_desc, alpha, beta, gamma, tiles, rows, cols, depth,
    TERMS: gl.constexpr, SYMMETRIC: gl.constexpr, SYMMETRIZE: gl.constexpr,
):  # fmt: skip
    """out = alpha A B + beta C + gamma D; with SYMMETRIC alpha A Bᵀ + ..., of which the lower triangle is computed."""
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 1, BLOCK, BLOCK_K], a_desc.layout)
    b_shape: gl.constexpr = [STAGES, 1, BLOCK, BLOCK_K] if SYMMETRIC else [STAGES, 1, BLOCK_K, BLOCK]
    b_ring = gl.allocate_shared_memory(b_desc.dtype, b_shape, b_desc.layout)
    results = gl.allocate_shared_memory(out_desc.dtype, [2, 1, BLOCK, BLOCK], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    terms_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for which in gl.static_range(2):
        mbarrier.init(turns.index(which), count=1)
        mbarrier.init(terms_ready.index(which), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                c_desc, d_desc, out_desc, a_ring, b_ring, results.index(0), full, empty, turns.index(0),
                turns.index(1), terms_ready.index(0), alpha, beta, gamma, tiles, rows, cols, depth,
                gl.constexpr(0), TERMS, SYMMETRIC, SYMMETRIZE,
            )),
            (_multiply, (
                c_desc, d_desc, out_desc, a_ring, b_ring, results.index(1), full, empty, turns.index(1),
                turns.index(0), terms_ready.index(1), alpha, beta, gamma, tiles, rows, cols, depth,
                gl.constexpr(1), TERMS, SYMMETRIC, SYMMETRIZE,
            )),
            (_copy_operands, (a_desc, b_desc, a_ring, b_ring, full, empty, tiles, rows, cols, depth, SYMMETRIC)),
        ],
        [4, 1],  # warps of the second group and of the copying role; the first group has the kernel's
        [248, 24],  # their registers
    )  # fmt: skip


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def tiles(batch: int, n: int, m: int) -> int:
    """Tiles of a product (batch, n, m)."""
    return batch * _blocks(n) * _blocks(m)


def symmetric_tiles(batch: int, n: int) -> int:
    """Tiles of the lower triangle of a product (batch, n, n)."""
    return batch * _blocks(n) * (_blocks(n) + 1) // 2


def symmetric_product(A: Tensor, B: Tensor, alpha: float, *terms: tuple[float, Tensor]) -> Tensor:
    """alpha A Bᵀ + the terms, known to be symmetric; A, B (batch, n, k), the result (batch, n, n)."""
    batch, n, _ = A.shape
    return _product(A, B, A.new_empty(batch, n, n), alpha, terms, symmetric=True)


def update(B: Tensor, X: Tensor, a: float, out: Tensor | None = None) -> Tensor:
    """a X + B X; B (batch, n, n), X (batch, n, m)."""
    return _product(B, X, torch.empty_like(X) if out is None else out, 1.0, ((a, X),), symmetric=False)


def _product(
    A: Tensor, B: Tensor, out: Tensor, alpha: float, terms: tuple[tuple[float, Tensor], ...], symmetric: bool
) -> Tensor:
    batch, n, m = out.shape
    count = symmetric_tiles(batch, n) if symmetric else tiles(batch, n, m)
    (beta, C), (gamma, D) = (*terms, (0.0, out), (0.0, out))[:2]
    with torch.cuda.device_of(A):
        product_kernel[(min(count, processors(A.device)),)](
            describe(A, BLOCK, BLOCK_K), describe(B, BLOCK, BLOCK_K) if symmetric else describe(B, BLOCK_K, BLOCK),
            *(describe(T, BLOCK, BLOCK) for T in (C, D, out)),
            alpha, beta, gamma, count, _blocks(n), _blocks(m), triton.cdiv(A.shape[2], BLOCK_K.value),
            TERMS=len(terms), SYMMETRIC=symmetric, SYMMETRIZE=symmetric and A is not B, num_warps=4,
        )  # fmt: skip
    return out


def _blocks(side: int) -> int:
    return -(-side // int(BLOCK.value))


def describe(tensor: Tensor, rows: gl.constexpr, cols: gl.constexpr) -> TensorDescriptor:
    """A batch of matrices, 16 bits an element, in tiles of (rows, cols)."""
    block = [1, rows.value, cols.value]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, _layout(*block))


@functools.cache
def _layout(*block: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.float16)  # the same for bfloat16
