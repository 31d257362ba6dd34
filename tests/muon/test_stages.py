"""Pack and apply in Triton against their torch twins, in the interpreter or on a GPU; outputs start as NaN."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muon import matrices
from muon.matrices import buckets

pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")

from muon.kernels import stages
from muon.kernels.products import TritonOperations

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(shape, seed, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(DEVICE, dtype)


def one_bucket(shapes, dtype=torch.float32, scale=1.0, split=None):
    """Parameters, gradients and momentums of these shapes as one bucket, the same on every call."""
    tensors = [[randn(shape, 10 * i + kind, dtype, scale) for i, shape in enumerate(shapes)] for kind in range(3)]
    (bucket,) = buckets(*tensors, split=split)
    return tensors, bucket


def packed(module, bucket, weight=0.9, nesterov=True, maximize=False, dtype=torch.float32):
    n, m = bucket.sides
    X = TritonOperations().allocate(bucket.batch, n, m, bucket.blocks[0].param, dtype)
    module.pack(bucket, X, weight, nesterov, maximize, 1e-7)
    return X


@settings(max_examples=12)
@given(
    n=st.integers(1, 70),
    m=st.integers(70, 140),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    weight=st.sampled_from([0.0, 0.95]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    scale=st.sampled_from([1.0, 1e-30, 1e30]),
)
@example(64, 128, torch.float32, 0.95, True, False, 1.0)  # aligned, whole tiles
@example(65, 129, torch.float32, 0.95, False, True, 1e30)
def test_pack(n, m, dtype, weight, nesterov, maximize, scale):
    scale = 1.0 if dtype == torch.float16 else scale
    shapes = [(n, m), (m, n), (2, n, m)]
    (_, grads, ours), bucket = one_bucket(shapes, dtype, scale)
    (_, _, theirs), twin = one_bucket(shapes, dtype, scale)
    before = [grad.clone() for grad in grads]
    result = packed(stages, bucket, weight, nesterov, maximize)
    expected = packed(matrices, twin, weight, nesterov, maximize)
    # In float16 the twin rounds the momentum's difference and the update, the kernel only what it stores.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=4 * eps, atol=4 * eps)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps * scale)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


@settings(max_examples=10)
@given(
    n=st.integers(1, 70),
    m=st.integers(70, 140),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    x_dtype=st.sampled_from([torch.float32, torch.float16]),
)
@example(64, 128, torch.float32, torch.float16)
def test_apply(n, m, dtype, x_dtype):
    shapes = [(n, m), (m, n), (2, n, m)]
    (ours, _, _), bucket = one_bucket(shapes, dtype)
    (theirs, _, _), twin = one_bucket(shapes, dtype)
    packed(stages, bucket)
    X = TritonOperations().allocate(bucket.batch, n, m, ours[0], x_dtype)
    X[:, :n, :m] = randn((bucket.batch, n, m), 99, x_dtype)
    stages.apply(bucket, X, 0.9, -0.5, -2.0)
    matrices.apply(twin, X, 0.9, -0.5, -2.0)
    eps = torch.finfo(dtype).eps
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize(("shapes", "split"), [([(60, 20), (60, 20)], (20, 20, 20)), ([(60, 20), (2, 60, 20)], 3)])
def test_blocks_of_rows_and_batches_are_reached(shapes, split):
    (ours, _, _), bucket = one_bucket(shapes, split=split)
    (theirs, _, _), twin = one_bucket(shapes, split=split)
    assert stages.suits(bucket)
    for module, one in ((stages, bucket), (matrices, twin)):
        module.apply(one, packed(module, one), 0.9, -0.5, -2.0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_spoils_its_own_matrix(bad):
    (_, grads, _), bucket = one_bucket([(20, 30)] * 3)
    grads[1][3, 4] = bad
    X = packed(stages, bucket)[:, :20, :30]
    assert X[[0, 2]].isfinite().all() and X[1].isnan().all()


def test_zeros_stay_zeros():
    (_, grads, momentums), bucket = one_bucket([(20, 30)] * 2)
    for tensor in grads + momentums:
        tensor.zero_()
    assert packed(stages, bucket).count_nonzero() == 0


@pytest.mark.parametrize("layout", ["transposed", "double"])
def test_what_does_not_suit(layout):
    p = randn((20, 30), 0).mT if layout == "transposed" else randn((20, 30), 0).double()
    (bucket,) = buckets([p], [p.clone(memory_format=torch.preserve_format)], [p.clone()])
    assert not stages.suits(bucket)
