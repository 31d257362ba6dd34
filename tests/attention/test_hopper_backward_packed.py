"""Which queries meet which keys in the Hopper backward, and where the results go, of packed sequences, without a GPU.

The Gluon kernel does not run in Triton's interpreter. Its schedule does, as plain Python, with torch's products. The
kernels before and after it are interpreted.
"""

import types

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attention.packed import backward_packed, forward_packed
from attention.reference import LOG2_E, Options, tiled_backward, tiled_forward

pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")
WINDOWS = [(None, None), (None, 0), (20, 10), (15, None)]


def plain(function, **names):
    """A Gluon function as plain Python."""
    gl = types.SimpleNamespace(
        where=lambda condition, x, y: x if condition else y, minimum=min, maximum=max, cdiv=lambda x, y: -(-x // y)
    )
    return types.FunctionType(function.fn.__code__, {**function.fn.__globals__, "gl": gl, **names})


def rows_from(x, entry, head, first, number):
    """`number` positions of a head as the copy engine reads them: to the end of the tensor, and then zeros."""
    part = x[entry, first : first + number, head]
    return torch.nn.functional.pad(part, (0, 0, 0, number - part.shape[0])).float()


def grad_kernel(
    q, k, v, do, unit_lse, padded_delta, dk_out, dv_out, dk_ptr, dv_ptr, sums, redo, tasks, *sizes, **constants
):  # fmt: skip
    """The twin of `grad_kernel`, of tensors instead of descriptors."""
    from attention.kernels import hopper_backward_schedule as schedule

    *problem, scale, softcap = sizes
    block_m, block_n, width = constants["BLOCK_M"], constants["BLOCK_N"], constants["D"]
    bounds = (constants["BOUND_LEFT"], constants["BOUND_RIGHT"])
    steps = plain(schedule.count_steps)
    task = plain(schedule.task_of_tile, gl=types.SimpleNamespace(load=lambda place: int(tasks[place])), TASK=8)
    locate = plain(
        schedule.locate_tile, place_of_tile=plain(schedule.place_of_tile), task_of_tile=lambda _, n: task(0, n)
    )
    problem[7] = int(tasks[0])
    group, tiles_q, tiles_k, heads = (problem[i] for i in (1, 6, 7, 9))
    tiles_of_dq = sums.view(-1, block_m // 16, width // 8, 8, 4, 2, 2)
    q, k, v, do = (torch.nn.functional.pad(x, (0, width - x.shape[3])) for x in (q, k, v, do))
    seen = set()
    for t in range(int(tasks[1]), heads * tiles_k):
        batch, head, start_n, first_q, first_k, first_tile, sequence = locate(t, problem, tasks, block_n)
        assert (head, first_k, start_n) not in seen
        seen.add((head, first_k, start_n))
        begin, tiles, before, full = steps(start_n, sequence, block_m, block_n, *bounds)
        keys, values = (rows_from(x, batch, head, first_k + start_n, block_n) for x in (k, v))
        dk, dv = torch.zeros(2, block_n, width)
        for i in range(group * tiles):
            head_q, tile = head * group + i // tiles, begin + i % tiles
            queries, grads = (rows_from(x, batch, head_q, first_q + tile * block_m, block_m) for x in (q, do))
            padded = slice((first_tile + tile) * block_m, (first_tile + tile + 1) * block_m)
            lse, delta = unit_lse[head_q, padded], padded_delta[head_q, padded]
            s = keys @ queries.mT * scale
            slope = 1.0
            if softcap is not None:
                slope = 1 - (s / softcap).tanh() ** 2
                s = softcap * (s / softcap).tanh()
            p = torch.exp2(s * LOG2_E - lse)
            if not before <= i % tiles < before + full:
                p = torch.where(hidden(tile * block_m, start_n, sequence, p.shape, bounds), 0.0, p)
            ds = p * (values @ grads.mT - delta) * slope
            dv += p @ grads
            dk += ds @ queries
            parts = (ds.mT @ keys).view(block_m // 16, 2, 8, width // 8, 4, 2).permute(0, 3, 2, 4, 1, 5)
            tiles_of_dq[head_q * tiles_q + first_tile + tile] += parts
        if (dk * 0.0).sum() != 0:
            redo.fill_(1)
        number = min(sequence[3] - start_n, block_n)
        dk_out[0, first_k + start_n : first_k + start_n + number, head] = dk[:number, : dk_out.shape[3]] * scale
        dv_out[0, first_k + start_n : first_k + start_n + number, head] = dv[:number, : dv_out.shape[3]]


def hidden(start_m, start_n, sequence, shape, bounds):
    """Which keys (rows) are hidden from which queries."""
    _, _, _, length_k, shift_left, shift_right, *_ = sequence
    keys, queries = start_n + torch.arange(shape[0])[:, None], start_m + torch.arange(shape[1])
    result = keys >= length_k
    if bounds[0]:
        result = result | (keys - shift_left < queries)
    return result | (queries < keys - shift_right) if bounds[1] else result


@pytest.fixture
def backward(monkeypatch):
    from attention.kernels import hopper_backward as kernels

    launch = {"__getitem__": lambda self, grid: grad_kernel}
    monkeypatch.setattr(kernels, "grad_kernel", type("Kernel", (), launch)())
    for name, block_m in (("TILES", 32), ("SOFTCAP_TILES", 16)):
        monkeypatch.setattr(kernels, name, {64: kernels.Tile(block_m, 16, 2)})
    monkeypatch.setattr(kernels, "processors", lambda device: 3)
    monkeypatch.setattr(kernels, "L2_SHARE", 2**16)  # several sections
    for name in ("describe", "describe_rows"):
        monkeypatch.setattr(kernels, name, lambda x, *sizes: x)
    torch.use_deterministic_algorithms(True)  # memory starts as NaN
    yield kernels.backward
    torch.use_deterministic_algorithms(False)


def packed_inputs(lengths_q, lengths_k, group, rest):
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    total_q, total_k = int(cu_q[-1]) + rest, int(cu_k[-1]) + rest
    q, grad_out = (torch.randn(total_q, 2 * group, 40, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(total_k, 2, 40, dtype=torch.float16) for _ in range(2))
    options = Options(
        0.15, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k)
    )  # fmt: skip
    return q, k, v, grad_out, options


LENGTHS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=5)


@settings(max_examples=20, deadline=None, derandomize=True)
@example([(0, 50), (40, 0), (33, 47), (33, 20), (0, 0)], 2, (None, 0), 40, False, False)
@given(LENGTHS, st.integers(1, 3), st.sampled_from(WINDOWS), st.integers(0, 40), st.booleans(), st.booleans())
def check_packed(backward, lengths, group, window, rest, with_lse, with_softcap):
    lengths_q, lengths_k = zip(*lengths, strict=True)
    torch.manual_seed(0)
    q, k, v, grad_out, options = packed_inputs(lengths_q, lengths_k, group, rest + 1)
    options = options._replace(window_left=window[0], window_right=window[1], sinks=torch.randn(2 * group))
    options = options._replace(softcap=0.7 if with_softcap else None)
    if min(options.max_seqlen_q, options.max_seqlen_k) == 0:
        return
    out, lse, _ = forward_packed(tiled_forward, *(x.double() for x in (q, k, v)), options, False)
    grad_lse = torch.randn(lse.shape) if with_lse else None
    saved = (q, k, v, out.half(), lse.float(), options, False)
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in (grad_out, grad_lse, *saved)]
    expected = backward_packed(tiled_backward, *exact)
    for mine, truth in zip(backward(grad_out, grad_lse, *saved)[:4], expected[:4], strict=True):
        torch.testing.assert_close(mine.double(), truth.double(), rtol=4e-3, atol=4e-3)


def test_packed_sequences_meet_their_own_keys(backward):
    check_packed(backward)


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize(("window", "softcap"), [((None, None), None), ((20, 10), 0.7)])
def test_what_is_not_finite_stays_in_its_sequence(backward, window, softcap, where):
    """In the second sequence, into which the first one's last tile reaches, and in the rows past the end."""
    torch.manual_seed(0)
    *tensors, options = packed_inputs((40, 20, 50), (45, 12, 30), 2, 9)
    options = options._replace(window_left=window[0], window_right=window[1], softcap=softcap)
    out, lse, _ = forward_packed(tiled_forward, *(x.double() for x in tensors[:3]), options, False)

    def run():
        q, k, v, grad_out = tensors
        return backward(grad_out, None, q, k, v, out.half(), lse.float(), options, False)[:3]

    before = run()
    rows = (options.cu_seqlens_k if where in (1, 2) else options.cu_seqlens_q).tolist()
    tensors[where][rows[2] - 1, :, 3] = torch.nan
    tensors[where][rows[3] :] = torch.inf
    for i, (mine, clean) in enumerate(zip(run(), before, strict=True)):
        rows = (options.cu_seqlens_k if i else options.cu_seqlens_q).tolist()
        own = np.arange(mine.shape[0])
        others = (own < rows[1]) | (own >= rows[2])
        torch.testing.assert_close(mine[others], clean[others], rtol=4e-3, atol=4e-3)
    assert not mine.isfinite().all() or where == 2
