"""The product kernels against their torch twins, in the interpreter or on a GPU, with outputs that start as NaN."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muon.newton_schulz import TorchOperations

pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")

import triton
import triton.language as tl

from muon.kernels.operations import TritonOperations
from muon.kernels.products import triangle_tile

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton_ops, torch_ops = TritonOperations(), TorchOperations()

# One tile, its edge, one past it; the tiles of float16 are 64 and 128 wide, those of float32 64.
sides = st.sampled_from([16, 48, 64, 80, 128, 144])
dtypes = st.sampled_from([torch.float32, torch.float16])


def integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers so small that every product and sum is exact, so that every bit of a result is known."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("side", [1, 2, 7, 8, 9, 16, 17, 64])
def test_the_triangle_of_tiles_is_covered_once(side):
    @triton.jit
    def kernel(out_ptr, side, GROUP: tl.constexpr):
        i, j = triangle_tile(tl.program_id(0), side, GROUP)
        tl.store(out_ptr + 2 * tl.program_id(0), i)
        tl.store(out_ptr + 2 * tl.program_id(0) + 1, j)

    tiles = side * (side + 1) // 2
    out = torch.full((tiles, 2), -1, dtype=torch.int32, device=DEVICE)
    kernel[(tiles,)](out, side, GROUP=8)
    assert sorted(map(tuple, out.tolist())) == [(i, j) for i in range(side) for j in range(i + 1)]


@settings(max_examples=10)
@given(batch=st.integers(1, 2), n=sides, k=sides, dtype=dtypes, seed=st.integers(0, 2**31))
@example(1, 144, 80, torch.float16, 0)
def test_gram_is_exact_on_integers(batch, n, k, dtype, seed):
    X = integers(batch, n, k, dtype=dtype, seed=seed)
    assert torch.equal(triton_ops.gram(X), (X.double() @ X.double().mT).to(dtype))


@settings(max_examples=10)
@given(batch=st.integers(1, 2), n=sides, terms=st.integers(1, 2), dtype=dtypes, seed=st.integers(0, 2**31))
@example(1, 144, 2, torch.float16, 0)
def test_symmetric_is_exact_on_integers(batch, n, terms, dtype, seed):
    A = integers(batch, n, n, dtype=dtype, seed=seed).tril()
    A = A + A.tril(-1).mT
    C = torch.stack([integers(n, n, dtype=dtype, seed=seed + 1)] * batch)
    C = C.tril() + C.tril(-1).mT
    arguments = [(2.0, A), (-0.5, C)][:terms]
    expected = 0.25 * A.double() @ A.double()
    for beta, term in arguments:
        expected = expected + beta * term.double()
    result = triton_ops.symmetric(A, A, 0.25, *arguments)
    assert torch.equal(result, expected.to(dtype))
    assert torch.equal(
        torch_ops.symmetric(A.double(), A.double(), 0.25, *((b, t.double()) for b, t in arguments)), expected
    )


@settings(max_examples=10)
@given(batch=st.integers(1, 2), n=sides, m=sides, dtype=dtypes, seed=st.integers(0, 2**31))
@example(1, 80, 144, torch.float16, 0)
def test_update_is_exact_on_integers(batch, n, m, dtype, seed):
    B = integers(batch, n, n, dtype=dtype, seed=seed)
    X = integers(batch, n, m, dtype=dtype, seed=seed + 1)
    assert torch.equal(triton_ops.update(B, X, 3.5), (3.5 * X.double() + B.double() @ X.double()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_symmetric_products_are_symmetric_to_the_bit(dtype):
    # A Gram iteration whose matrices were symmetric only to rounding had four times the error.
    X = torch.randn(1, 144, 80, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype) / 100
    A = triton_ops.gram(X)
    B = triton_ops.symmetric(A, A, 2.0, (-4.775, A))
    C = triton_ops.symmetric(A, B, 1.0, (3.4445, A), (2.0, B))
    for result in (A, B, C):
        assert torch.equal(result, result.mT)


@pytest.mark.parametrize(("n", "m"), [(16, 32), (17, 32), (16, 31), (1, 1)])
def test_allocate_pads_with_zeros(n, m):
    X = triton_ops.allocate(2, n, m, torch.empty(0, device=DEVICE), torch.float16)
    assert X.shape[1] % 16 == X.shape[2] % 16 == 0 and X.shape[1] - n < 16 and X.shape[2] - m < 16
    assert X.is_contiguous() and X.dtype == torch.float16
    X[:, :n, :m] = 0
    assert X.count_nonzero() == 0


def test_offsets_beyond_two_to_the_31():
    """The last matrix of a batch of more than 2³¹ elements."""
    if DEVICE == "cpu":
        pytest.skip(reason="needs a GPU's memory; batch offsets are int64 in every kernel")
    X = torch.zeros(4097, 512, 1024, dtype=torch.float16, device=DEVICE)
    X[-1] = integers(512, 1024, dtype=torch.float16, seed=0)
    assert torch.equal(triton_ops.gram(X)[-1], triton_ops.gram(X[-1:].clone())[0])
    B = torch.zeros(4097, 512, 512, dtype=torch.float16, device=DEVICE)
    B[-1] = integers(512, 512, dtype=torch.float16, seed=1)
    assert torch.equal(triton_ops.update(B, X, 2.0)[-1], triton_ops.update(B[-1:].clone(), X[-1:].clone(), 2.0)[0])
