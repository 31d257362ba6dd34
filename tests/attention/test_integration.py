"""What the package promises around the numbers: torch.compile, opcheck, autocast, memory, errors."""

import subprocess
import sys

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import attention
from attention import flash_attention, scaled_dot_product_attention

pytest.importorskip("triton", reason="needs Triton")
both_backends = pytest.mark.parametrize("backend", ["torch", "triton"])


@both_backends
@pytest.mark.parametrize("window_right", [None, 0, -1])
def test_opcheck(backend, window_right):
    q, k, v = (torch.randn(1, 9, heads, width, requires_grad=True) for heads, width in ((4, 8), (2, 8), (2, 5)))
    opcheck(torch.ops.attention.forward, (q, k, v, 0.3, window_right, backend))
    q, k, v = q.detach(), k.detach(), v.detach()
    out, lse = torch.ops.attention.forward(q, k, v, 0.3, window_right, backend)
    opcheck(
        torch.ops.attention.backward,
        (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, 0.3, window_right, backend),
    )


@both_backends
def test_compile_fullgraph(backend):
    def loss(q, k, v):
        out, lse = flash_attention(q * 2, k, v, causal=True, return_lse=True, backend=backend)
        return (out.square().sum() + lse.sum()) / 2

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    tensors = [torch.randn(2, 20, heads, 16) for heads in (4, 2, 2)]
    eager = [x.clone().requires_grad_() for x in tensors]
    traced = [x.clone().requires_grad_() for x in tensors]
    loss(*eager).backward()
    compiled(*traced).backward()
    for x, y in zip(eager, traced, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


def test_compile_with_inductor():
    torch.manual_seed(0)
    layer = attention.SelfAttention(32, 4, 2, qk_norm=True)
    x = torch.randn(2, 20, 32)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).sum().backward()


def test_dynamic_length_compiles_few_graphs():
    compilations = []

    def counting_backend(graph, inputs):
        compilations.append(graph)
        return graph

    layer = attention.SelfAttention(32, 4, qk_norm=True)
    compiled = torch.compile(layer, fullgraph=True, backend=counting_backend)
    function = torch.compile(scaled_dot_product_attention, fullgraph=True, backend=counting_backend)
    for length in (20, 33, 64, 100, 7):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(compiled(x), layer(x))
    assert len(compilations) <= 2, "the length must become dynamic after its first change"
    compilations.clear()
    for length in (20, 33, 64, 100, 7):
        function(torch.randn(1, 2, 50, 8), torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8), is_causal=True)
    assert len(compilations) <= 2


@both_backends
def test_autocast_decides_the_dtype(backend):
    q, k, v = (torch.randn(1, 16, 2, 8, requires_grad=True) for _ in "qkv")
    with torch.autocast("cpu", torch.float16):
        out, lse = flash_attention(q, k, v, return_lse=True, backend=backend)
        other = scaled_dot_product_attention(q, k, v)
    assert (out.dtype, lse.dtype, other.dtype) == (torch.float16, torch.float32, torch.float16)
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    exact = flash_attention(q.half(), k.half(), v.half(), backend=backend)
    torch.testing.assert_close(out, exact, rtol=0, atol=0)


@both_backends
def test_activation_checkpointing(backend):
    q, k, v = (torch.randn(1, 16, 2, 8, requires_grad=True) for _ in "qkv")
    expected = torch.autograd.grad(flash_attention(q, k, v, backend=backend).square().sum(), (q, k, v))
    out = checkpoint(lambda q, k, v: flash_attention(q, k, v, backend=backend), q, k, v, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), expected)


@both_backends
def test_repeated_backward_is_bitwise_equal(backend):
    q, k, v = (torch.randn(1, 70, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    out = flash_attention(q, k, v, causal=True, deterministic=True, backend=backend)
    first, second = (torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


@both_backends
def test_second_derivative_is_refused(backend):
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(flash_attention(q, q, q, backend=backend).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first-order"):
        grad.sum().backward()


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


def test_forward_mode_is_refused():
    q, k, v, tangent = torch.randn(4, 1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: flash_attention(q, k, v), (q,), (tangent,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        scaled_dot_product_attention(torch.autograd.forward_ad.make_dual(q, tangent), k, v)


@pytest.mark.parametrize("causal", [True, False])
def test_no_score_matrix_is_formed(causal):
    from attention.reference import TILE, tiled_backward, tiled_forward

    length = 5 * TILE + 3
    q, k, v = torch.randn(3, 1, length, 2, 8)
    window_right = 0 if causal else None
    with LargestTensor() as largest:
        out, lse = tiled_forward(q, k, v, 0.3, window_right)
        tiled_backward(out, lse, q, k, v, out, lse, 0.3, window_right)
    assert 2 * length * 8 <= largest.numel <= 2 * TILE**2


def test_only_linear_tensors_are_saved():
    q, k, v = (torch.randn(1, 300, 2, 8, requires_grad=True) for _ in "qkv")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        flash_attention(q, k, v)
    assert sorted(x.numel() for x in saved) == [2 * 300] + 4 * [300 * 2 * 8]


def test_only_what_descriptors_cannot_read_is_copied():
    from attention.kernels.common import loadable

    qkv = torch.randn(2, 10, 6, 40, dtype=torch.bfloat16)
    readable = [*torch.split(qkv, [4, 1, 1], dim=2), qkv.transpose(1, 2), qkv[:, 3:, ..., 8:32]]
    assert all(loadable(x) is x for x in readable)
    others = [
        qkv[..., 1:],
        qkv.mT,
        qkv[..., :1].expand(2, 10, 6, 40),
        torch.randn(2, 3, 2, 9),
        qkv[:, :1].expand(qkv.shape),
    ]
    for x in others:
        copy = loadable(x)
        assert copy is not x and torch.equal(copy, x)
        assert loadable(copy) is copy


def test_import_has_no_side_effects():
    script = (
        "import sys, torch; before = torch.random.get_rng_state(); import attention;"
        "assert 'triton' not in sys.modules, 'imports triton';"
        "assert not torch.cuda.is_initialized(), 'initialises CUDA';"
        "assert torch.equal(before, torch.random.get_rng_state())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_works_without_triton():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "import torch; from attention import flash_attention\n"
        "q = torch.randn(1, 4, 1, 8, requires_grad=True); flash_attention(q, q, q).sum().backward()\n"
        "try: flash_attention(q, q, q, backend='triton')\n"
        "except ValueError as error: assert 'not installed' in str(error)\n"
        "else: raise SystemExit('no error')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_triton_on_cpu_tensors_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend='triton' needs tensors on a GPU, got cpu"):
        flash_attention(*torch.randn(3, 1, 4, 1, 8), backend="triton")


def inputs(q=(2, 8, 4, 16), k=(2, 8, 2, 16), v=(2, 8, 2, 16), dtypes=(torch.float32,) * 3):
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in zip((q, k, v), dtypes, strict=True)]


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (inputs(q=(8, 4, 16)), ValueError, r"q must have the 4 dimensions .* got shape \(8, 4, 16\)"),
        (inputs(k=(2, 8, 3, 16), v=(2, 8, 3, 16)), ValueError, "q's 4 heads must be a multiple of k's 3"),
        (inputs(k=(2, 8, 2, 8)), ValueError, "k's head dimension is 8 but q's is 16"),
        (inputs(k=(2, 9, 2, 16)), ValueError, "k has length 9 but v has 8"),
        (inputs(v=(2, 8, 1, 16)), ValueError, "k has 2 heads but v has 1"),
        (inputs(k=(3, 8, 2, 16)), ValueError, "k has batch size 3 but q has 2"),
        (inputs((1, 2, 1, 257), (1, 2, 1, 257)), ValueError, "q's head dimension must be from 1 to 256, got 257"),
        (inputs(v=(2, 8, 2, 0)), ValueError, "v's head dimension must be from 1 to 256, got 0"),
        (inputs(k=(2, 8, 0, 16), v=(2, 8, 0, 16)), ValueError, "q's 4 heads must be a multiple of k's 0"),
        (inputs(dtypes=(torch.int64,) * 3), TypeError, "q must be float16, bfloat16 or float32, got torch.int64"),
        (inputs(dtypes=(torch.float64,) * 3), TypeError, "q must be float16, bfloat16 or float32, got torch.float64"),
        (
            inputs(dtypes=(torch.float32, torch.float32, torch.float16)),
            TypeError,
            "v is torch.float16 but q is torch.float32",
        ),
    ],
)
def test_errors_name_the_argument(tensors, error, message):
    with pytest.raises(error, match=message):
        flash_attention(*tensors)


def test_mixed_devices():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="k is on meta but q is on cpu"):
        flash_attention(q, k.to("meta"), v)


@pytest.mark.parametrize(
    "option",
    [
        {"window": (3, 0)},
        {"softcap": 30.0},
        {"sinks": torch.zeros(4)},
        {"alibi_slopes": torch.zeros(4)},
        {"dropout_p": 0.1},
        {"return_max_logits": True},
    ],
)
def test_unsupported_options_say_so(option):
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        flash_attention(*inputs(), **option)


def test_backend_errors():
    with pytest.raises(ValueError, match="backend must be one of auto, triton, hopper, torch, got 'cuda'"):
        flash_attention(*inputs(), backend="cuda")
    with pytest.raises(NotImplementedError, match="hopper"):
        flash_attention(*inputs(), backend="hopper")


def test_scaled_dot_product_attention_errors():
    q, k, v = (x.transpose(1, 2) for x in inputs())
    mask = torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attn_mask is given and is_causal=True"):
        scaled_dot_product_attention(q, q, q, mask, is_causal=True)
    with pytest.raises(NotImplementedError, match="attn_mask"):
        scaled_dot_product_attention(q, q, q, mask)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    with pytest.raises(ValueError, match="query has 4 heads and key 2: they must be equal unless enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)
    with pytest.raises(ValueError, match="key must have the 4 dimensions"):
        scaled_dot_product_attention(q, k[0], v)
