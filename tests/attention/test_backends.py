"""Which backend runs a call, decided without a GPU: tensors here are what the decision looks at."""

from types import SimpleNamespace

import pytest
import torch

from attention import backends, flash_attention
from attention.backends import backward_runs_on_hopper, pick_backend, runs_on_hopper, why_not_hopper
from attention.reference import Options

BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS = Options(1.0)
CU_SEQLENS = torch.tensor([0, 200])
PACKED = OPTIONS._replace(cu_seqlens_q=CU_SEQLENS, cu_seqlens_k=CU_SEQLENS, max_seqlen_q=200, max_seqlen_k=200)
UNCOVERED = [
    ("alibi_slopes", {"slopes": torch.ones(1, 2)}),
    ("attn_mask", {"mask": torch.ones(1, 1, 1, 1)}),
    ("dropout_p", {"seed": torch.ones(1)}),
]
COVERED = [{"softcap": 2.0}, {"sinks": torch.ones(2)}, {"window_right": 0}, {"window_left": 3, "window_right": 4}]


def fake(*shape, dtype=BF16, device="cuda"):
    """A tensor that isn't there."""
    numel = torch.Size(shape).numel()
    return SimpleNamespace(shape=torch.Size(shape), dtype=dtype, device=torch.device(device), numel=lambda: numel)


def has_reason(reason, *words):
    return reason is not None and all(word in reason for word in words)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backends, "HAS_TRITON", True)


Q = fake(2, 200, 4, 64)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_have_no_hopper_kernels(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert has_reason(why_not_hopper(Q, OPTIONS, False), "Hopper GPU", "cuda")
    assert not runs_on_hopper("auto", Q, Q, OPTIONS, False)


def test_the_cpu_is_not_asked_for_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: pytest.fail("asked"))
    q = fake(2, 200, 4, 64, device="cpu")
    assert has_reason(why_not_hopper(q, OPTIONS, False), "Hopper GPU", "cpu")
    assert not runs_on_hopper("auto", q, q, OPTIONS, False)


def test_the_device_of_the_queries_decides(monkeypatch):
    """A machine may hold GPUs of several kinds."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 1 else (8, 0))
    assert why_not_hopper(fake(2, 200, 4, 64, device="cuda:1"), OPTIONS, False) is None
    assert why_not_hopper(fake(2, 200, 4, 64, device="cuda:0"), OPTIONS, False) is not None


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("fields", [{}, *COVERED])
def test_what_hopper_covers(on_hopper, dtype, fields):
    q, options = fake(2, 200, 4, 64, dtype=dtype), OPTIONS._replace(**fields)
    assert why_not_hopper(q, options, False) is None
    assert runs_on_hopper("auto", q, q, options, False)
    assert pick_backend("hopper", q, options, False) == "hopper"


def test_what_hopper_does_not_cover(on_hopper):
    assert has_reason(why_not_hopper(fake(2, 200, 4, 64, dtype=FP32), OPTIONS, False), "float32", "float16")
    assert why_not_hopper(Q, OPTIONS, True) is None
    assert why_not_hopper(Q, OPTIONS._replace(softcap=2.0), False) is None
    assert has_reason(why_not_hopper(Q, OPTIONS._replace(softcap=2.0), True), "return_max_logits", "softcap")
    assert not runs_on_hopper("auto", Q, Q, OPTIONS._replace(softcap=2.0), True)


@pytest.mark.parametrize(("name", "fields"), UNCOVERED)
def test_options_that_hopper_does_not_cover(on_hopper, name, fields):
    options = OPTIONS._replace(**fields)
    assert has_reason(why_not_hopper(Q, options, False), name)
    assert not runs_on_hopper("auto", Q, Q, options, False)
    with pytest.raises(ValueError, match=f"^backend='hopper' .*{name}: use 'auto' or 'triton'$"):
        pick_backend("hopper", Q, options, False)


def test_auto_leaves_what_is_small_to_the_portable_kernels(on_hopper):
    queries, width = backends.MIN_HOPPER_QUERIES, backends.MIN_HOPPER_WIDTH

    def on_auto(seqlen, head_dim, head_dim_v):
        return runs_on_hopper("auto", fake(2, seqlen, 4, head_dim), fake(2, 9, 4, head_dim_v), OPTIONS, False)

    assert on_auto(queries, width, width)
    assert not on_auto(queries - 1, width, width)
    assert not on_auto(queries, width - 1, width - 1)
    assert on_auto(queries, 8, width) and on_auto(queries, width, 8)  # the wider of the two counts


def test_packed_queries_count_by_the_longest_sequence(on_hopper):
    q = fake(100_000, 4, 64)
    assert runs_on_hopper("auto", q, q, PACKED, False)
    short = PACKED._replace(max_seqlen_q=backends.MIN_HOPPER_QUERIES - 1)
    assert not runs_on_hopper("auto", q, q, short, False)
    assert runs_on_hopper("hopper", q, q, short, False)


def test_what_was_asked_for_runs(on_hopper):
    small = fake(1, 1, 1, 8)
    assert runs_on_hopper("hopper", small, small, OPTIONS, False)
    assert not runs_on_hopper("triton", Q, Q, OPTIONS, False)


@pytest.mark.parametrize("shape", [(0, 200, 4, 64), (2, 0, 4, 64)])
def test_nothing_to_do_is_nobodys(on_hopper, shape):
    for backend in ("auto", "hopper"):
        assert not runs_on_hopper(backend, fake(*shape), Q, OPTIONS, False)
        assert not runs_on_hopper(backend, Q, fake(*shape), OPTIONS, False)


def test_the_backward_covers_less(on_hopper):
    def on_auto(q=Q, k=Q, v=Q, **fields):
        return backward_runs_on_hopper("auto", q, k, v, OPTIONS._replace(**fields))

    assert on_auto() and all(on_auto(**fields) for fields in COVERED)
    assert not on_auto(deterministic=True)
    assert not on_auto(v=fake(2, 200, 4, 72))
    assert not on_auto(*(fake(2, 200, 4, 68),) * 3)  # rows of 136 bytes
    assert not on_auto(*(fake(2, 200, 4, 32),) * 3)
    assert not on_auto(*(fake(2, 200, 4, 64, dtype=FP32),) * 3)
    packed = (fake(200, 4, 64),) * 3
    assert backward_runs_on_hopper("auto", *packed, PACKED)
    assert not backward_runs_on_hopper("hopper", *packed, PACKED._replace(max_seqlen_k=0))
    assert not backward_runs_on_hopper("hopper", *packed, PACKED._replace(cu_seqlens_q=torch.tensor([0])))
    assert not backward_runs_on_hopper("triton", Q, Q, Q, OPTIONS)
    assert not backward_runs_on_hopper("hopper", Q, Q, Q, OPTIONS._replace(deterministic=True))


def test_auto_names_the_operators_choice(on_hopper, monkeypatch):
    """Which kernel runs, the operator decides: under a compiler the length may not be known here."""
    assert pick_backend("auto", Q, OPTIONS, False) == "auto"
    assert pick_backend("auto", fake(2, 200, 4, 64, device="cpu"), OPTIONS, False) == "torch"
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    assert pick_backend("auto", Q, OPTIONS, False) == "torch"


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_without_triton(monkeypatch, backend):
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=f"^backend='{backend}' needs the package triton.*: use 'auto' or 'torch'$"):
        pick_backend(backend, Q, OPTIONS, False)
    assert pick_backend("torch", Q, OPTIONS, False) == "torch"


def test_portable_kernels_need_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    q = fake(2, 200, 4, 64, device="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick_backend("triton", q, OPTIONS, False) == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"^backend='triton' needs tensors on a GPU, got cpu"):
        pick_backend("triton", q, OPTIONS, False)
    assert pick_backend("triton", Q, OPTIONS, False) == "triton"


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"^backend must be one of auto, triton, hopper, torch, got 'cuda'$"):
        pick_backend("cuda", Q, OPTIONS, False)


def test_hopper_on_a_cpu_is_one_line():
    pytest.importorskip("triton", reason="without Triton the message is another")
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"^backend='hopper' needs .* GPU, got cpu: use 'auto' or 'triton'$"):
        flash_attention(q, q, q, backend="hopper")
