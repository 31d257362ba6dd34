"""The whole Gram iteration of a matrix with at most 64 rows or columns on Hopper, in Gluon: X stays in shared memory.

The portable kernel (``small.py``) walks over G in the L2 cache six times, because Triton has no shared memory that
outlives a loop. Here a program copies its matrix in once, iterates on it in place and copies the result out.

Torch twin: ``muon.newton_schulz.gram_iteration`` after ``muon.matrices.normalize``.
"""

import torch
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

from muon.kernels.hopper import barrier, describe, is_hopper, load, store, write

# Triton 3.6 keeps the method private.
REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
# Tiles of X that a program has room for, in pairs; few numbers, so that few kernels are compiled. Two programs with 6
# share a multiprocessor, 12 almost fill its 227 KB.
ROOM = (2, 4, 6, 8, 12)

SIDE = gl.constexpr(64)  # rows of X, padded
BLOCK_M = gl.constexpr(128)  # columns of a tile of X
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))


@gluon.jit
def _multiply(x, y_tile, acc):
    """x Y + acc in float16: x in registers, Y in shared memory."""
    x = gl.convert_layout(x, gl.DotOperandLayout(0, SQUARE, 2))
    return warpgroup_mma(x, y_tile, acc).to(gl.float16)


@gluon.jit
def _normalize(g, x, eps, TILES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """X = G over its Frobenius norm; both lie in the same memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [4, 1], [1, 0])
    scale = 1.0
    square = _sum_of_squares(g, scale, layout, TILES, ROWS, COLS)
    if not (square > 1e-20 and square < 1e30 and eps <= 1.0):
        # Squares may have vanished or overflowed, and only here can eps matter: the largest magnitude divided out.
        largest = gl.zeros((ROWS, COLS), gl.float32, layout)
        for t in range(TILES):
            largest = gl.maximum(largest, gl.abs(g.index(t).load(layout).to(gl.float32)))
        whole = gl.max(gl.max(largest, 1), 0)
        whole = gl.where(whole == 0.0, 1.0, whole)
        scale = gl.exp2(-gl.floor(gl.log2(whole)))  # a power of two rounds nothing
        least = eps * whole * scale
        square = _sum_of_squares(g, scale, layout, TILES, ROWS, COLS)
        square = gl.where(square < least * least, least * least, square)
    rest = 1.0 / gl.sqrt(square)
    for t in range(TILES):
        x.index(t).store((g.index(t).load(layout).to(gl.float32) * scale * rest).to(gl.float16))
    fence_async_shared()
    barrier()


@gluon.jit
def _sum_of_squares(g, scale, layout: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    squares = gl.zeros((ROWS, COLS), gl.float32, layout)
    for t in range(TILES):
        scaled = g.index(t).load(layout).to(gl.float32) * scale
        squares += scaled * scaled
    return gl.sum(gl.sum(squares, 1), 0)


@gluon.jit
def _gram(x, IS_TALL: gl.constexpr, TILES: gl.constexpr):
    acc = gl.zeros((SIDE, SIDE), gl.float32, SQUARE)
    for t in range(TILES):
        tile = x.index(t)
        flipped = tile.permute((1, 0))
        if IS_TALL:
            acc = warpgroup_mma(flipped, tile, acc, is_async=True)
        else:
            acc = warpgroup_mma(tile, flipped, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
    return warpgroup_mma_wait(0, deps=[acc]).to(gl.float16)


@gluon.jit
def _start_update(x_tile, q_tile, shift, IS_TALL: gl.constexpr):
    """(Q + shift I) of a tile of X, or of Xᵀ, in float32, on its way."""
    if IS_TALL:
        return warpgroup_mma(x_tile, q_tile, shift * x_tile.load(SQUARE).to(gl.float32), is_async=True)
    else:
        return warpgroup_mma(q_tile, x_tile, shift * x_tile.load(WIDE).to(gl.float32), is_async=True)


@gluon.jit
def _update_two(x, y, q_tile, shift, t, IS_TALL: gl.constexpr):
    """Y = (Q + shift I) X of tiles t and t + 1, whose latencies overlap; Y may lie where X does."""
    first = _start_update(x.index(t), q_tile, shift, IS_TALL)
    second = _start_update(x.index(t + 1), q_tile, shift, IS_TALL)
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    barrier()  # nobody reads X any more
    y.index(t).store(first.to(y.dtype))
    y.index(t + 1).store(second.to(y.dtype))


@gluon.jit
def small_kernel(
    g_desc, out_desc, coefficients, eps,
    IS_TALL: gl.constexpr, NORMALIZE: gl.constexpr, STEPS: gl.constexpr, RESTARTS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """out = U p(S / ‖G‖) Vᵀ; coefficients a, b, c of each step in turn; bit i of RESTARTS: step i begins a segment."""
    batch = gl.program_id(0)
    ROWS: gl.constexpr = BLOCK_M if IS_TALL else SIDE
    COLS: gl.constexpr = SIDE if IS_TALL else BLOCK_M
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], gl.float16)
    square_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], gl.float16)
    tiles = gl.allocate_shared_memory(g_desc.dtype, [TILES, 1, ROWS, COLS], g_desc.layout)
    if REINTERPRET:
        g = tiles.reinterpret(g_desc.dtype, [TILES, ROWS, COLS], tile_layout)
        x = tiles.reinterpret(gl.float16, [TILES, ROWS, COLS], tile_layout)
    else:
        g = tiles._reinterpret(g_desc.dtype, [TILES, ROWS, COLS], tile_layout)
        x = tiles._reinterpret(gl.float16, [TILES, ROWS, COLS], tile_layout)
    r_tile = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], square_layout)
    z_tile = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], square_layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    fence_async_shared()
    mbarrier.expect(loaded, TILES * g_desc.block_type.nbytes)
    for t in range(TILES):
        load(g_desc, [batch, t * BLOCK_M, 0] if IS_TALL else [batch, 0, t * BLOCK_M], loaded, tiles.index(t))
    mbarrier.wait(loaded, 0, deps=[tiles])
    if NORMALIZE:
        _normalize(g, x, eps, TILES, ROWS, COLS)

    r = gl.zeros((SIDE, SIDE), gl.float16, SQUARE)
    q = r
    shift = 1.0
    for i in gl.static_range(STEPS):
        a, b, c = coefficients[3 * i], coefficients[3 * i + 1], coefficients[3 * i + 2]
        if (RESTARTS >> i) & 1:
            if i > 0:
                write(z_tile, q)
                for t in range(0, TILES, 2):
                    _update_two(x, x, z_tile, shift, t, IS_TALL)
                fence_async_shared()
                barrier()
            r = _gram(x, IS_TALL, TILES)
        write(r_tile, r)
        r32 = r.to(gl.float32)
        z = (c * warpgroup_mma(r_tile, r_tile, gl.zeros((SIDE, SIDE), gl.float32, SQUARE)) + b * r32).to(gl.float16)
        if (RESTARTS >> i) & 1:
            q = z
            shift = a
            if i + 1 < STEPS and not (RESTARTS >> (i + 1)) & 1:
                write(z_tile, z)
        else:
            write(z_tile, z)
            q = _multiply(q, z_tile, a * q.to(gl.float32) + shift * z.to(gl.float32))
            shift *= a
        if i + 1 < STEPS and not (RESTARTS >> (i + 1)) & 1:
            rz = _multiply(r, z_tile, a * r32)
            write(r_tile, rz)
            r = _multiply(z, r_tile, a * rz.to(gl.float32))

    write(z_tile, q)
    for t in range(0, TILES, 2):
        _update_two(x, g, z_tile, shift, t, IS_TALL)
        fence_async_shared()
        barrier()
        for u in gl.static_range(2):
            start = (t + u) * BLOCK_M
            store(out_desc, [batch, start, 0] if IS_TALL else [batch, 0, start], tiles.index(t + u))
    tma.store_wait(0)


def suits(G: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel can iterate on these matrices (batch, rows, cols) in this dtype."""
    n, m = sorted(G.shape[1:])
    fits = SIDE.value // 2 < n <= SIDE.value and m <= ROOM[-1] * BLOCK_M.value
    return fits and G.is_cuda and G.element_size() == 2 and dtype == torch.float16 and is_hopper(G.device)


def orthogonalize_small(
    G: Tensor, out: Tensor, coefficients: tuple[float, ...], restarts: int, eps: float | None
) -> None:
    """out = U p(S / ‖G‖) Vᵀ of G (batch, rows, cols); both can be described."""
    batch, rows, cols = G.shape
    is_tall = rows > cols
    tile = (BLOCK_M, SIDE) if is_tall else (SIDE, BLOCK_M)
    with torch.cuda.device_of(G):
        small_kernel[(batch,)](
            describe(G, *tile), describe(out, *tile), coefficients, eps or 0.0,
            IS_TALL=is_tall, NORMALIZE=eps is not None, STEPS=len(coefficients) // 3, RESTARTS=restarts,
            TILES=next(tiles for tiles in ROOM if tiles * BLOCK_M.value >= max(rows, cols)), num_warps=4,
        )  # fmt: skip
