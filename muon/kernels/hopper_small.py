"""The whole Gram iteration of a matrix with at most 64 rows or columns on Hopper, in Gluon: X stays in shared memory.

The portable kernel (``small.py``) walks over G in the L2 cache six times, because Triton has no shared memory that
outlives a loop. Here a program copies its matrix in, iterates on it in place and copies the result out.

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

from muon.kernels.hopper import barrier, describe, is_hopper, load, store

# Triton 3.6 keeps the method private.
REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
# Tiles of X that a program has room for, in pairs; few numbers, so that few kernels are compiled. Two programs with 6
# share a multiprocessor, 12 almost fill its 227 KB.
ROOM = (2, 4, 6, 8, 12)

SIDE = gl.constexpr(64)  # rows of X, padded
BLOCK_M = gl.constexpr(128)  # columns of a tile of X
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _columns(tiles, t, IS_TALL: gl.constexpr):
    """Columns of a matrix as the rows of a tile (BLOCK_M, SIDE), so that they can be the left side of a product."""
    if IS_TALL:
        return tiles.index(t)
    else:
        return tiles.index(t).permute((1, 0))


@gluon.jit
def _add_gram(x, t, acc, IS_TALL: gl.constexpr):
    """X Xᵀ + acc of tiles t and t + 1, on its way."""
    for u in gl.static_range(2):
        columns = _columns(x, t + u, IS_TALL)
        acc = warpgroup_mma(columns.permute((1, 0)), columns, acc, is_async=True)
    return acc


@gluon.jit
def _gram(g, loaded, IS_TALL: gl.constexpr, TILES: gl.constexpr):
    """G Gᵀ, of tiles as they arrive."""
    acc = gl.zeros((SIDE, SIDE), gl.float32, LAYOUT)
    for t in range(0, TILES, 2):
        mbarrier.wait(loaded.index(t // 2), 0, deps=[g])
        acc = warpgroup_mma_wait(1, deps=[_add_gram(g, t, acc, IS_TALL)])
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _trace(square):
    offs_i = gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
    offs_j = gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))
    return gl.sum(gl.sum(gl.where(offs_i[:, None] == offs_j[None, :], square, 0.0), 1), 0)


@gluon.jit
def _rescale(g, TILES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Bring G's largest magnitude into [1, 2) by a power of two, which rounds nothing; returns that magnitude."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [4, 1], [1, 0])
    largest = gl.zeros((ROWS, COLS), gl.float32, layout)
    for t in range(TILES):
        largest = gl.maximum(largest, gl.abs(g.index(t).load(layout).to(gl.float32)))
    whole = gl.max(gl.max(largest, 1), 0)
    whole = gl.where(whole == 0.0, 1.0, whole)
    scale = gl.exp2(-gl.floor(gl.log2(whole)))
    for t in range(TILES):
        g.index(t).store((g.index(t).load(layout).to(gl.float32) * scale).to(g.dtype))
    fence_async_shared()
    barrier()
    return whole * scale


@gluon.jit
def _write(matrix, values):
    """Values to shared memory that nobody has been reading since the last barrier, for products to read."""
    matrix.store(values)
    fence_async_shared()
    barrier()


@gluon.jit
def _multiply(x, y_tile, acc):
    """x Y + acc in float32: x in registers, Y in shared memory."""
    return warpgroup_mma(gl.convert_layout(x, LEFT), y_tile, acc)


@gluon.jit
def _start_update(g, x, q_tile, scale, shift, t, SCALED: gl.constexpr, IS_TALL: gl.constexpr):
    """(Q + shift I) X of tile t in float32, on its way, and X, which has to stay in registers meanwhile."""
    if SCALED:
        x32 = _columns(g, t, IS_TALL).load(LAYOUT).to(gl.float32) * scale
        left = gl.convert_layout(x32.to(gl.float16), LEFT)
    else:
        x16 = _columns(x, t, IS_TALL).load(LAYOUT)
        x32 = x16.to(gl.float32)
        left = gl.convert_layout(x16, LEFT)
    return warpgroup_mma(left, q_tile, shift * x32, is_async=True), left


@gluon.jit
def _update_two(g, x, y, q_tile, scale, shift, t, SCALED: gl.constexpr, IS_TALL: gl.constexpr):
    """Y = (Q + shift I) X of tiles t and t + 1, whose latencies overlap; Y may lie where X does, or G."""
    first, first_x = _start_update(g, x, q_tile, scale, shift, t, SCALED, IS_TALL)
    second, second_x = _start_update(g, x, q_tile, scale, shift, t + 1, SCALED, IS_TALL)
    first, first_x = warpgroup_mma_wait(1, deps=[first, first_x])
    _columns(y, t, IS_TALL).store(first.to(y.dtype))
    second, second_x = warpgroup_mma_wait(0, deps=[second, second_x])
    _write(_columns(y, t + 1, IS_TALL), second.to(y.dtype))


@gluon.jit
def _restart(g, x, q_tile, scale, shift, SCALED: gl.constexpr, IS_TALL: gl.constexpr, TILES: gl.constexpr):
    """X = (Q + shift I) X and the new X Xᵀ, which is multiplied while the next tiles are read."""
    acc = gl.zeros((SIDE, SIDE), gl.float32, LAYOUT)
    for t in range(0, TILES, 2):
        _update_two(g, x, x, q_tile, scale, shift, t, SCALED, IS_TALL)
        acc = warpgroup_mma_wait(2, deps=[_add_gram(x, t, acc, IS_TALL)])
    return warpgroup_mma_wait(0, deps=[acc]).to(gl.float16)


@gluon.jit
def small_kernel(
    g_desc, out_desc, coefficients, eps,
    IS_TALL: gl.constexpr, NORMALIZE: gl.constexpr, STEPS: gl.constexpr, RESTARTS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """out = U p(S / ‖G‖) Vᵀ; coefficients a, b, c of each step in turn; bit i of RESTARTS: step i begins a segment."""
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
    even = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], square_layout)
    odd = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], square_layout)
    loaded = gl.allocate_shared_memory(gl.int64, [TILES // 2, 1], mbarrier.MBarrierLayout())
    for t in gl.static_range(TILES // 2):
        mbarrier.init(loaded.index(t), count=1)
    fence_async_shared()
    barrier()
    batch = gl.program_id(0)
    for t in range(0, TILES, 2):
        mbarrier.expect(loaded.index(t // 2), 2 * g_desc.block_type.nbytes)
        for u in gl.static_range(2):
            start = (t + u) * BLOCK_M
            load(g_desc, [batch, start, 0] if IS_TALL else [batch, 0, start], loaded.index(t // 2), tiles.index(t + u))

    gram = _gram(g, loaded, IS_TALL, TILES)
    scale = 1.0
    if NORMALIZE:
        square = _trace(gram)
        least = 0.0
        if not (square > 1e-20 and square < 1e30 and eps <= 1.0):
            # Squares may have vanished or overflowed, and only here can eps matter.
            least = eps * _rescale(g, TILES, ROWS, COLS)
            gram = _gram(g, loaded, IS_TALL, TILES)
            square = _trace(gram)
        scale = 1.0 / gl.sqrt(gl.where(square < least * least, least * least, square))
        gram *= scale * scale

    ENDS: gl.constexpr = RESTARTS | 1 << STEPS
    r = gram.to(gl.float16)
    q = r
    shift = 1.0
    tile, other = even, odd  # factors take turns in them: after a barrier nobody reads the last but one
    for i in gl.static_range(STEPS):
        a, b, c = coefficients[3 * i], coefficients[3 * i + 1], coefficients[3 * i + 2]
        if i > 0 and (RESTARTS >> i) & 1:
            _write(tile, q)
            r = _restart(g, x, tile, scale, shift, NORMALIZE and RESTARTS & ((1 << i) - 2) == 0, IS_TALL, TILES)
            tile, other = other, tile
        _write(tile, r)
        r32 = r.to(gl.float32)
        z = (c * _multiply(r, tile, gl.zeros((SIDE, SIDE), gl.float32, LAYOUT)) + b * r32).to(gl.float16)
        tile, other = other, tile
        if not (RESTARTS >> i) & (ENDS >> (i + 1)) & 1:  # the segment has other steps
            _write(tile, z)
        if (RESTARTS >> i) & 1:
            q = z
            shift = a
        else:
            q = _multiply(q, tile, a * q.to(gl.float32) + shift * z.to(gl.float32)).to(gl.float16)
            shift *= a
        if not (ENDS >> (i + 1)) & 1:
            rz = _multiply(r, tile, a * r32).to(gl.float16)
            tile, other = other, tile
            _write(tile, rz)
            r = _multiply(z, tile, a * rz.to(gl.float32)).to(gl.float16)
        tile, other = other, tile

    _write(tile, q)
    for t in range(0, TILES, 2):
        _update_two(g, x, g, tile, scale, shift, t, NORMALIZE and RESTARTS & ((1 << STEPS) - 2) == 0, IS_TALL)
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
