"""What the Hopper backward does again when NaN came out is what the portable kernels do."""

import pytest
import torch

from attention.reference import Options

pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")


@pytest.mark.parametrize("where", [None, *range(4)])
@pytest.mark.parametrize(("window", "softcap"), [((None, 0), None), ((20, 10), 0.7)])
def test_the_repair_is_what_the_portable_kernels_do(window, softcap, where):
    """`where` of q, k, v and the gradient a number isn't finite."""
    from attention.kernels import backward, forward
    from attention.kernels.common import pointer
    from attention.kernels.hopper_backward_careful import repair_kernel

    torch.manual_seed(0)
    q, grad_out = (torch.randn(1, 70, 2, 40, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(1, 90, 1, 40, dtype=torch.float16) for _ in range(2))
    options = Options(0.15, *window, softcap)
    out, lse, _ = forward.forward(q, k, v, options, False)
    if where is not None:
        (q, k, v, grad_out)[where][0, 45, 0, 3] = torch.nan
    expected = backward.backward(grad_out, None, q, k, v, out, lse, options, False)[:3]
    delta = (out.float() * grad_out.float()).sum(-1).mT.contiguous()
    for redo in (False, True):
        grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
        repair_kernel[(2,)](
            pointer(q), pointer(k), pointer(v), pointer(grad_out), lse, delta, *grads, torch.tensor([int(redo)]),
            None, None, 2, 2, 70, 90, 70, 90, window[0] or 0, window[1], 2, options.scale, softcap,
            D=40, BLOCK_D=64, BOUND_LEFT=window[0] is not None, BOUND_RIGHT=True,
        )  # fmt: skip
        for mine, portables in zip(grads, expected, strict=True):
            if redo:
                torch.testing.assert_close(mine, portables, rtol=4e-3, atol=4e-3, equal_nan=True)
            else:
                assert mine.eq(7).all()
