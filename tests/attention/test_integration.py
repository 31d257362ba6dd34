"""What the package promises around the numbers: torch.compile, opcheck, autocast, memory, errors."""

import re
import subprocess
import sys

import pytest
import torch
from helpers.allocations import Allocations
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import attention
from attention import flash_attention, flash_attention_varlen, scaled_dot_product_attention
from attention.reference import Options

pytest.importorskip("triton", reason="needs Triton")
both_backends = pytest.mark.parametrize("backend", ["torch", "triton"])


CU_SEQLENS = torch.tensor([0, 4, 9], dtype=torch.int32)
PACKED = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS, "max_seqlen_q": 5, "max_seqlen_k": 5}
SEED = {"dropout_p": 0.3, "seed": torch.tensor([5])}


@both_backends
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_right": -1, "softcap": 2.0, "sinks": torch.randn(4)},
        {"window_left": 3, "mask": torch.randn(1, 4, 9, 1), **SEED},
        {"mask": torch.rand(9, 9)[None, None] > 0.3, "slopes": torch.rand(1, 1).expand(1, 4)},
        {"window_right": 0, "slopes": torch.rand(2, 4), "sinks": torch.randn(4), **PACKED, **SEED},
    ],
)
def test_opcheck(backend, options):
    packed = "cu_seqlens_q" in options
    q, k, v = (torch.randn(1, 9, heads, width) for heads, width in ((4, 8), (2, 8), (2, 5)))
    q, k, v = ((x[0] if packed else x).requires_grad_() for x in (q, k, v))
    for name in ("sinks", "mask"):
        if name in options and options[name].is_floating_point():
            options = options | {name: options[name].clone().requires_grad_()}
    fields = list(Options(0.3, **options)[:-1])
    opcheck(torch.ops.attention.forward, (q, k, v, *fields, True, backend))
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in (q, k, v, *fields)]
    out, lse, _ = torch.ops.attention.forward(*detached, False, backend)
    with_mask = "mask" in options and options["mask"].is_floating_point()
    saved = (*detached[:3], out, lse, *detached[3:], with_mask, backend)
    opcheck(torch.ops.attention.backward, (torch.randn_like(out), torch.randn_like(lse), *saved))


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


def test_compiled_layers_compute_rotary_angles_once():
    """Not in every element of the kernels that rotate, where a pow, a cos and a sin cost ten times the rest."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(attention.SelfAttention(32, 4, 2, qk_norm=norm) for norm in (True, False)))
    x = torch.randn(2, 20, 32)
    out, (forward, backward) = run_fw_bw_and_get_code(lambda: torch.compile(layers, fullgraph=True)(x))
    torch.testing.assert_close(out, layers(x))
    assert "torch.ops.attention.forward" in forward and "torch.ops.attention.backward" in backward
    assert forward.count("= torch.ops.attention.rotary_angles") == 1 and "rotary_angles(" not in backward
    for function in ("pow", "cos", "sin"):
        assert not re.search(rf"\b{function}\(", forward + backward)


def test_dynamic_length_compiles_few_graphs():
    compilations = []

    def counting_backend(graph, inputs):
        compilations.append(graph)
        return graph

    def everything(q):
        options = {"window": (9, 0), "softcap": 3.0, "sinks": torch.ones(2), "alibi_slopes": torch.ones(2)}
        return flash_attention(q, q, q, **options, dropout_p=0.1, return_max_logits=True)

    def packed(q, cu_seqlens):
        return flash_attention_varlen(q, q, q, cu_seqlens, cu_seqlens, q.shape[0], q.shape[0], causal=True)

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
    for function, inputs in ((everything, (1, 2, 8)), (packed, (2, 8))):
        compilations.clear()
        compiled = torch.compile(function, fullgraph=True, backend=counting_backend)
        for length in (20, 33, 64, 100, 7):
            extra = () if function is everything else (torch.tensor([0, 5, length], dtype=torch.int32),)
            torch.manual_seed(0)
            q = torch.randn(*inputs[:-2], length, *inputs[-2:])
            compiled(q, *extra)
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
@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_is_the_same_in_the_backward(backend, compiled):
    """Under activation checkpointing and torch.compile too: the output's gradient of v is the weights it used."""
    q, k = torch.randn(2, 1, 20, 2, 8)
    v = torch.zeros(1, 20, 2, 8, requires_grad=True)

    def attend(v):
        return flash_attention(q, k, v, dropout_p=0.5, backend=backend)

    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    torch.manual_seed(0)
    (whole,) = torch.autograd.grad(function(v).sum(), v)
    torch.manual_seed(0)
    (again,) = torch.autograd.grad(checkpoint(function, v, use_reentrant=False).sum(), v)
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    torch.manual_seed(0)
    torch.testing.assert_close(function(torch.ones_like(v)).sum(), whole.sum())
    assert not torch.equal(torch.autograd.grad(function(v).sum(), v)[0], whole)


@both_backends
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 0), (None, 2, 2)])
@pytest.mark.parametrize("option", [None, "sinks", "max_logits"])
def test_vmap(backend, in_dims, option):
    shapes = [list(shape) for shape in ((2, 9, 4, 8), (2, 7, 2, 8), (2, 7, 2, 5))]
    for shape, dim in zip(shapes, in_dims, strict=True):
        if dim is not None:
            shape.insert(dim, 3)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    options = {"sinks": torch.randn(4, requires_grad=True)} if option == "sinks" else {}
    leaves = [*inputs, *options.values()]

    def function(q, k, v):
        asked = {"return_lse": True, "return_max_logits": option == "max_logits"}
        return flash_attention(q, k, v, causal=True, **options, **asked, backend=backend)

    results = torch.func.vmap(function, in_dims)(*inputs)
    ones = [
        function(*(x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)))
        for i in range(3)
    ]
    expected = [torch.stack(tensors) for tensors in zip(*ones, strict=True)]
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y)
    grad_out = torch.randn_like(results[0])
    grads, expected_grads = (torch.autograd.grad(x[0], leaves, grad_out) for x in (results, expected))
    for x, y in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(x, y)


@both_backends
@pytest.mark.parametrize("option", [{}, {"dropout_p": 0.5}, {"return_max_logits": True}])
def test_vmap_over_nothing(backend, option):
    q, k = torch.randn(2, 0, 9, 4, 8, requires_grad=True), torch.randn(2, 7, 2, 8, requires_grad=True)

    def function(q):
        out, lse, *_ = flash_attention(q, k, k[..., :5], return_lse=True, **option, backend=backend)
        return out, lse

    out, lse = torch.func.vmap(function, in_dims=1, randomness="different")(q)
    assert out.shape == (0, 2, 9, 4, 5) and lse.shape == (0, 2, 4, 9)
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k))
    assert [x.shape for x in grads] == [q.shape, k.shape] and not grads[1].any()


def test_vmap_draws_one_dropout_or_several():
    q = torch.randn(1, 8, 2, 4).expand(3, 1, 8, 2, 4)

    def outputs(randomness):
        return torch.vmap(lambda x: flash_attention(x, x, x, dropout_p=0.5), randomness=randomness)(q)

    same, different = outputs("same"), outputs("different")
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    assert not torch.equal(different[0], different[1])


@both_backends
@pytest.mark.parametrize("with_sinks", [True, False])
def test_a_batch_of_gradients(backend, with_sinks):
    """vmap of the backward, as torch.autograd.functional.jacobian(vectorize=True) does it."""
    inputs = [torch.randn(1, 9, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    out = flash_attention(*inputs, causal=True, sinks=sinks, backend=backend)
    leaves = inputs + [sinks] * with_sinks
    grad_out = torch.randn(3, *out.shape)
    grads = torch.autograd.grad(out, leaves, grad_out, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        for x, y in zip(grads, torch.autograd.grad(out, leaves, grad_out[i], retain_graph=True), strict=True):
            torch.testing.assert_close(x[i], y)


def test_export():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = attention.SelfAttention(32, 4)
            self.sinks = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            q = self.layer(x).unflatten(-1, (4, 8))
            return flash_attention(q, q, q, window=(5, 0), sinks=self.sinks)

    model = Model()
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(model, (torch.randn(2, 20, 32),), dynamic_shapes=({1: length},)).module()
    x = torch.randn(2, 77, 32)
    torch.testing.assert_close(exported(x), model(x))


@both_backends
def test_repeated_backward_is_bitwise_equal(backend):
    inputs = [torch.randn(1, 70, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    inputs.append(torch.randn(4, requires_grad=True))
    out = flash_attention(*inputs[:3], sinks=inputs[3], causal=True, deterministic=True, backend=backend)
    first, second = (torch.autograd.grad(out.square().sum(), inputs, retain_graph=True) for _ in range(2))
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


@pytest.mark.parametrize("options", [{"window_right": 0}, {"window_left": 500, "softcap": 3.0}, {**SEED}])
def test_memory_is_linear_in_the_length(options):
    """Forward and backward of the torch backend. Twice the length takes at most 2.1 times the memory."""
    from attention.reference import TILE, tiled_backward, tiled_forward

    def peak(length):
        q, k, v = torch.randn(3, 1, length, 1, 32)
        with Allocations() as memory, LargestTensor() as largest:
            out, lse, _ = tiled_forward(q, k, v, Options(0.3, **options), True)
            tiled_backward(out, lse, q, k, v, out, lse, Options(0.3, **options), False)
        assert length * 32 <= largest.numel <= max(4 * TILE**2, 2 * length * 32)
        return memory.peak

    assert peak(12 * TILE) > 8 * 12 * TILE * 32 * 4, "counts nothing"
    assert peak(12 * TILE) <= 2.1 * peak(6 * TILE)


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
        (["abc", *inputs()[1:]], TypeError, "q must be a tensor, got str"),
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


def test_meta_tensors_tell_the_shapes():
    q, k, v = (x.to("meta") for x in inputs())
    out, lse = flash_attention(q, k, v, return_lse=True, dropout_p=0.1)
    assert out.device.type == lse.device.type == "meta" and out.shape == q.shape and lse.shape == (2, 4, 8)


def test_mixed_devices():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="k is on meta but q is on cpu"):
        flash_attention(q, k.to("meta"), v)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"window": (3, -2)}, ValueError, r"window must be \(left, right\).*got \(3, -2\)"),
        ({"window": (3,)}, ValueError, r"window must be \(left, right\).*got \(3,\)"),
        ({"window": 3}, ValueError, r"window must be \(left, right\).*got 3"),
        ({"window": (3, None)}, ValueError, r"window must be \(left, right\).*got \(3, None\)"),
        ({"window": (2.5, 0)}, ValueError, r"window must be \(left, right\).*got \(2.5, 0\)"),
        ({"softcap": 0.0}, ValueError, "softcap must be above 0 and finite, got 0.0"),
        ({"softcap": float("inf")}, ValueError, "softcap must be above 0 and finite, got inf"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks must have shape \(4,\), got \(2,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, TypeError, "sinks must be a floating-point .* torch.int64"),
        ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks is on meta but q is on cpu"),
        ({"alibi_slopes": torch.zeros(3, 4)}, ValueError, r"alibi_slopes .* \(4,\) or \(2, 4\), got \(3, 4\)"),
        ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, ValueError, "alibi_slopes requires a gradient"),
        ({"sinks": [0.0] * 4}, TypeError, "sinks must be a tensor, got list"),
        ({"alibi_slopes": (0.5,) * 4}, TypeError, "alibi_slopes must be a tensor, got tuple"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"dropout_p": -0.1}, ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
    ],
)
def test_bad_options(option, error, message):
    with pytest.raises(error, match=message):
        flash_attention(*inputs(), **option)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seqlens_q": CU_SEQLENS.long()}, TypeError, "cu_seqlens_q must be int32, got torch.int64"),
        (
            {"cu_seqlens_k": CU_SEQLENS[:2]},
            ValueError,
            r"cu_seqlens_k must have shape .* as cu_seqlens_q .*, got \(2,\)",
        ),
        (
            {"cu_seqlens_q": torch.tensor([0, 7, 4], dtype=torch.int32)},
            ValueError,
            "cu_seqlens_q must begin with 0, not decrease",
        ),
        ({"cu_seqlens_k": 1 + CU_SEQLENS}, ValueError, "cu_seqlens_k must begin with 0"),
        ({"cu_seqlens_k": 2 * CU_SEQLENS}, ValueError, "end at most at 9, the length of k"),
        ({"max_seqlen_k": 5.0}, TypeError, "max_seqlen_k must be an int, got 5.0"),
        ({"cu_seqlens_q": CU_SEQLENS[0]}, ValueError, r"cu_seqlens_q must have shape \(B \+ 1,\)"),
        ({"cu_seqlens_k": CU_SEQLENS.to("meta")}, ValueError, "cu_seqlens_k is on meta but q is on cpu"),
        ({"cu_seqlens_q": [0, 4, 9]}, TypeError, "cu_seqlens_q must be a tensor, got list"),
        ({"cu_seqlens_k": [0, 4, 9]}, TypeError, "cu_seqlens_k must be a tensor, got list"),
        ({"sinks": [0.0] * 4}, TypeError, "sinks must be a tensor, got list"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0, got -1"),
        ({"q": torch.zeros(1, 9, 4, 8)}, ValueError, r"q must have the 3 dimensions \(total, H, D\)"),
        ({"k": torch.zeros(8, 2, 8)}, ValueError, "k has length 8 but v has 9"),
        ({"alibi_slopes": torch.zeros(3, 4)}, ValueError, r"alibi_slopes .* \(4,\) or \(2, 4\)"),
    ],
)
def test_varlen_errors(changes, error, message):
    tensors = {"q": torch.zeros(9, 4, 8), "k": torch.zeros(9, 2, 8), "v": torch.zeros(9, 2, 8)}
    with pytest.raises(error, match=message):
        flash_attention_varlen(**{**tensors, **PACKED, **changes})


def test_backend_errors():
    with pytest.raises(ValueError, match="backend must be one of auto, triton, hopper, torch, got 'cuda'"):
        flash_attention(*inputs(), backend="cuda")
    with pytest.raises(ValueError, match="backend='hopper' needs tensors on a Hopper GPU, got cpu"):
        flash_attention(*inputs(), backend="hopper")


def test_scaled_dot_product_attention_errors():
    q, k, v = (x.transpose(1, 2) for x in inputs())
    mask = torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attn_mask is given and is_causal=True"):
        scaled_dot_product_attention(q, q, q, mask, is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask must be broadcastable to \(2, 4, 8, 8\), got shape \(7, 8\)"):
        scaled_dot_product_attention(q, q, q, mask[:7])
    with pytest.raises(TypeError, match=r"attn_mask must be bool, .* got torch.int32"):
        scaled_dot_product_attention(q, q, q, mask.int())
    with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\), got 1.5"):
        scaled_dot_product_attention(q, q, q, dropout_p=1.5)
    with pytest.raises(ValueError, match="query has 4 heads and key 2: they must be equal unless enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)
    with pytest.raises(TypeError, match="attn_mask must be a tensor, got list"):
        scaled_dot_product_attention(q, q, q, [[True]])
    with pytest.raises(TypeError, match="query must be a tensor, got NoneType"):
        scaled_dot_product_attention(None, q, q)
    with pytest.raises(ValueError, match="key must have the 4 dimensions"):
        scaled_dot_product_attention(q, k[0], v)
