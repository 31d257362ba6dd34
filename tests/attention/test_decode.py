"""The decode operator against float64, and what is promised around its numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from attention.cache import KVCache
from tests.attention.checks import LAYOUTS, assert_right, tensor

pytest.importorskip("triton", reason="needs Triton")
both_backends = pytest.mark.parametrize("backend", ["torch", "triton"])


@pytest.fixture(autouse=True)
def outputs_start_as_nan():
    """What a kernel doesn't write stays NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def operands(
    batch, seqlen, capacity, heads_k, group, width, width_v, dtype, layout="contiguous", device="cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = tensor((batch, seqlen, heads_k * group, width), layout, dtype, device)
    k, v = (tensor((batch, capacity, heads_k, w), layout, dtype, device) for w in (width, width_v))
    return q, k, v


def by_the_definition(q, k, v, lengths, window_left, scale) -> torch.Tensor:
    """Query by query, each with the keys that it sees and no others, in the dtype of the operands."""
    group, seqlen = q.shape[2] // k.shape[2], q.shape[1]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    for b, length in enumerate(lengths.tolist()):
        for i in range(seqlen):
            end = max(length - seqlen + i + 1, 0)
            start = 0 if window_left is None else max(end - 1 - window_left, 0)
            weights = (torch.einsum("hd,jhd->hj", q[b, i], k[b, start:end]) * scale).softmax(-1)
            out[b, i] = torch.einsum("hj,jhd->hd", weights, v[b, start:end])
    return out


def check_decode(q, k, v, lengths, window_left=None, scale=None, backend="triton") -> torch.Tensor:
    """Checks the operator on these operands, of which what lies behind the lengths becomes NaN first."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    lengths = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    unused = (torch.arange(k.shape[1], device=q.device) >= lengths[:, None])[:, :, None, None]
    k, v = k.masked_fill(unused, torch.nan), v.masked_fill(unused, torch.nan)
    out = torch.ops.attention.decode(q, k, v, lengths, scale, window_left, backend)
    assert out.shape == (*q.shape[:3], v.shape[3]) and out.dtype == q.dtype
    plain = by_the_definition(q, k, v, lengths, window_left, scale)
    truth = by_the_definition(q.double(), k.double(), v.double(), lengths, window_left, scale)
    assert_right({"out": out}, {"out": plain}, {"out": truth})
    return out


@both_backends
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), window_left=st.none() | st.integers(0, 60), scale=st.sampled_from([0.3, 1.0, 0.0, -0.3]))
def test_against_float64(backend, data, window_left, scale):
    batch, heads_k, group = (data.draw(st.integers(1, most)) for most in (3, 2, 5))
    seqlen, width, width_v = (data.draw(st.integers(1, most)) for most in (6, 40, 40))
    capacity = data.draw(st.integers(seqlen, 300))
    lengths = data.draw(st.lists(st.integers(0, capacity), min_size=batch, max_size=batch))
    dtype, layout = data.draw(st.sampled_from([torch.float32, torch.float16])), data.draw(st.sampled_from(LAYOUTS))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensors = operands(batch, seqlen, capacity, heads_k, group, width, width_v, dtype, layout)
    check_decode(*tensors, lengths, window_left, scale, backend)


@pytest.mark.parametrize(("num_splits", "at_once", "seqlen"), [(1, 16, 5), (2, 16, 1), (7, 2, 5), (20, 16, 1)])
def test_any_number_of_splits(monkeypatch, num_splits, at_once, seqlen):
    """Fewer keys than splits, splits without keys, no keys at all, more splits than are joined at once."""
    from attention.kernels import decode

    monkeypatch.setattr(decode, "choose_splits", lambda *_: num_splits)
    monkeypatch.setattr(decode, "SPLITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    check_decode(*operands(4, seqlen, 600, 1, 4, 16, 16, torch.float16), [600, 70, 5, 0])
    check_decode(*operands(3, seqlen, 600, 1, 4, 16, 16, torch.float16), [600, 513, 512], window_left=200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("width", "width_v"), [(64, 64), (128, 128), (256, 256), (1, 1), (16, 256), (129, 40)])
def test_head_widths(dtype, width, width_v):
    torch.manual_seed(0)
    check_decode(*operands(1, 2, 100, 1, 3, width, width_v, dtype), [97])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_more_rows_than_a_tile_of_queries_has(dtype):
    """A prompt that is read in pieces: every tile has bounds of its own."""
    torch.manual_seed(0)
    check_decode(*operands(2, 40, 100, 1, 5, 16, 16, dtype), [100, 61])
    check_decode(*operands(2, 40, 100, 1, 5, 16, 16, dtype), [100, 61], window_left=7)


def test_logits_far_from_zero():
    q, k, v = operands(1, 1, 300, 1, 2, 16, 16, torch.float32)
    check_decode(q * 1e3, k * 10, v, [300])


@both_backends
@pytest.mark.parametrize(("batch", "seqlen", "capacity"), [(0, 1, 8), (2, 0, 8), (2, 0, 0), (2, 1, 0)])
def test_sizes_zero(backend, batch, seqlen, capacity):
    out = check_decode(*operands(batch, seqlen, capacity, 2, 2, 8, 8, torch.float32), [0] * batch, backend=backend)
    assert not out.any()


@both_backends
@pytest.mark.parametrize("window_left", [None, 3])
def test_opcheck(backend, window_left):
    q, k, v = operands(2, 2, 20, 2, 2, 8, 8, torch.float32)
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    opcheck(torch.ops.attention.decode, (q, k, v, lengths, 0.3, window_left, backend))


@both_backends
def test_a_gradient_is_refused(backend):
    q, k, v = operands(1, 1, 8, 1, 1, 8, 8, torch.float32)
    lengths = torch.tensor([8], dtype=torch.int32)
    out = torch.ops.attention.decode(q.requires_grad_(), k, v, lengths, 0.3, None, backend)
    with pytest.raises(NotImplementedError, match="KV cache has no gradient"):
        out.sum().backward()


def test_enough_programs_but_no_tiny_splits():
    from attention.kernels.decode import PROGRAMS_PER_SM, SHORTEST_SPLIT, choose_splits

    cpu = torch.device("cpu")
    assert choose_splits(128, 8192, cpu) == 17  # 16 sequences, 8 key heads: 16 programs for each of 132 processors
    assert choose_splits(1, 8192, cpu) == 8192 // SHORTEST_SPLIT
    assert choose_splits(PROGRAMS_PER_SM * 132, 8192, cpu) == choose_splits(1, 100, cpu) == 1


def test_cache_memory_suits_the_kernels():
    """Rows start at multiples of 16 bytes, whatever the head width: nothing is copied at each step."""
    from attention.kernels.common import loadable

    for dtype, width in ((torch.float32, 5), (torch.bfloat16, 20), (torch.float16, 64)):
        cache = KVCache(2, 30, 3, width, torch.device("cpu"), dtype)
        assert cache.k.shape == cache.v.shape == (2, 30, 3, width)
        assert loadable(cache.k) is cache.k and loadable(cache.v) is cache.v


SCRIPT = """
import torch
from helpers.sm90 import compile_kernel

from attention.kernels.decode import _combine_kernel, _decode_kernel, choose_tile

def report(kernel, name, types, constants, **options):
    signature = {name: types.get(name, "fp32" if name == "scale" else "i32") for name in kernel.arg_names}
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr") and name not in constants]
    report = compile_kernel(kernel, signature, constants, pointers, **options)
    faults = [f"spills {report.spilled_bytes} bytes"] if report.spilled_bytes else []
    if kernel is _decode_kernel and "cp.async" not in report.ptx:
        faults.append("loads its keys without a pipeline")
    print(name, faults or "ok")

def decode(dtype, width, width_v, rows, windowed, split):
    tile = choose_tile(torch.float32 if dtype == "fp32" else torch.bfloat16, width, width_v, rows, torch.device("cpu"))
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")} | {"enable_fp_fusion": True}
    constants = dict(D=width, DV=width_v, WINDOWED=windowed, UPCAST=False, **tile)
    if not split:
        constants["lse_ptr"] = None
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*" + dtype) | {"lengths_ptr": "*i32", "lse_ptr": "*fp32"}
    types["out_ptr"] = "*fp32" if split else "*" + dtype
    name = f"decode {dtype} {width} {width_v} {rows} rows, windowed={windowed}, split={split}:"
    report(_decode_kernel, name, types, constants, **options)

for width in (32, 64, 128, 256):
    for rows, windowed, split in ((4, False, True), (64, True, True)):
        decode("bf16", width, width, rows, windowed, split)
    decode("fp32", width, width, 16, True, True)
decode("bf16", 192, 128, 4, False, False)
decode("bf16", 40, 24, 4, False, False)
types = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"}
constants = dict(DV=256, BLOCK_DV=256, BLOCK_S=16, EXP2=True)
report(_combine_kernel, "combine:", types, constants, num_warps=2, enable_fp_fusion=True)
"""


def test_every_configuration_compiles_for_hopper_without_spills():
    from helpers.sm90 import run_uninterpreted

    lines = run_uninterpreted(SCRIPT)
    assert len(lines) == 15
    assert [line for line in lines if not line.endswith(": ok")] == []
