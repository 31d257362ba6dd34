"""Forward and backward of attention beside torch's own, in TFLOP/s, interleaved in one process on random data.

    python -m benchmarks.attention --csv attention.csv            # the shapes of docs/performance.md
    python -m benchmarks.attention --shapes 4,4096,16,128,causal  # batch, length, heads, head width, mask

Masks: causal; full; window (causal, and the 1024 keys before the query's own); varlen (causal, all tokens of the batch
packed into sequences of random lengths that add up to the same). "triton_max" also returns max_logits.

A forward counts 4·D operations for each head's visible pair of query and key, a backward 2.5 times that.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention import flash_attention, flash_attention_varlen
from benchmarks.common import setting, write_csv

SHAPES = [
    "16,1024,32,64,causal",
    "4,4096,32,64,causal",
    "4,4096,32,64,full",
    "1,16384,32,64,causal",
    "16,1024,16,128,causal",
    "4,4096,16,128,causal",
    "4,4096,16,128,full",
    "1,16384,16,128,causal",
    "4,4096,8,256,causal",
    "16,1024,32,64,varlen",
    "4,4096,32,64,window",
    "4,4096,32,64,varlen",
    "1,16384,32,64,window",
    "1,16384,32,64,varlen",
    "16,1024,16,128,varlen",
    "4,4096,16,128,window",
    "4,4096,16,128,varlen",
    "1,16384,16,128,window",
    "1,16384,16,128,varlen",
]
MASKS = ("causal", "full", "window", "varlen")
WINDOW = 1024
SLEEP_CYCLES = 4_000_000  # about 2 ms, so that the device is busy until Python has launched what is measured
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, H, S, D) in and out, as views of (B, S, H, D)


def packed_lengths(batch: int, seqlen: int) -> list[int]:
    """Random lengths of a few sequences for each entry of the batch, batch · seqlen in all, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randint(1, batch * seqlen, (4 * batch - 1,), generator=generator).unique().tolist()
    return [end - start for start, end in zip([0, *cuts], [*cuts, batch * seqlen], strict=True)]


def visible_pairs(batch: int, seqlen: int, mask: str) -> int:
    """Of one head."""
    if mask == "full":
        return batch * seqlen**2
    if mask == "varlen":
        return sum(length * (length + 1) // 2 for length in packed_lengths(batch, seqlen))
    hidden_by_window = max(seqlen - WINDOW - 1, 0) if mask == "window" else 0
    return batch * (seqlen * (seqlen + 1) - hidden_by_window * (hidden_by_window + 1)) // 2


def ours(batch: int, seqlen: int, mask: str, with_max_logits: bool) -> Attend:
    options = {"causal": mask != "full", "return_max_logits": with_max_logits, "backend": "triton"}
    if mask == "window":
        options["window"] = (WINDOW, 0)
    lengths = packed_lengths(batch, seqlen)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if mask == "varlen":
            packed = (x[0] for x in (q, k, v))
            out = flash_attention_varlen(*packed, cu_seqlens, cu_seqlens, max(lengths), max(lengths), **options)
        else:
            out = flash_attention(q, k, v, **options)
        out = out[0] if with_max_logits else out
        return (out[None] if mask == "varlen" else out).transpose(1, 2)

    return attend


def flex(batch: int, seqlen: int, mask: str) -> Attend:
    """FlexAttention with a block mask, made outside the timing."""
    length = batch * seqlen if mask == "varlen" else seqlen
    document = torch.arange(length, device="cuda")
    if mask == "varlen":
        document = torch.repeat_interleave(torch.tensor(packed_lengths(batch, seqlen), device="cuda"))
    rules = {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j <= WINDOW),
        "varlen": lambda b, h, i, j: (i >= j) & (document[i] == document[j]),
    }
    block_mask = None
    if mask != "full":
        block_mask = create_block_mask(rules[mask], None, None, length, length, device="cuda")
    torch._dynamo.reset()  # or the ninth shape would be one too many to compile
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def variants(batch: int, seqlen: int, mask: str, with_flex: bool) -> dict[str, Attend]:
    def sdpa(backend: SDPBackend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")

        return attend

    attends = {"triton": ours(batch, seqlen, mask, False), "triton_max": ours(batch, seqlen, mask, True)}
    if mask in ("causal", "full"):
        attends["sdpa_flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
        attends["sdpa_cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    if with_flex:
        attends["flex"] = flex(batch, seqlen, mask)
    return attends


def milliseconds(function: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(batch: int, seqlen: int, heads: int, width: int, mask: str, repeats: int, with_flex: bool) -> list[dict]:
    torch.manual_seed(0)
    sizes = (1, batch * seqlen) if mask == "varlen" else (batch, seqlen)
    tensors = [torch.randn(*sizes, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, grad = (x.transpose(1, 2) for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    attends = variants(batch, seqlen, mask, with_flex)
    flush = torch.empty(2**26, device="cuda", dtype=torch.int32)  # writing it empties the L2 cache
    times: dict[str, tuple[list[float], list[float]]] = {}
    for repeat in range(repeats + 3):
        for name, attend in list(attends.items()):
            try:
                flush.zero_()
                torch.cuda._sleep(SLEEP_CYCLES)
                out: list[Tensor] = []
                forward = milliseconds(lambda attend=attend, out=out: out.append(attend(q, k, v)))
                flush.zero_()
                torch.cuda._sleep(SLEEP_CYCLES)
                backward = milliseconds(lambda out=out: torch.autograd.grad(out[0], (q, k, v), grad))
            except RuntimeError as error:
                print(f"# {name} can't run {batch},{seqlen},{heads},{width}: {str(error).splitlines()[0]}")
                del attends[name]
                continue
            if repeat >= 3:
                times.setdefault(name, ([], []))[0].append(forward)
                times[name][1].append(backward)
    operations = 4 * heads * width * visible_pairs(batch, seqlen, mask)
    rows = []
    for name, (forwards, backwards) in times.items():
        forward, backward = statistics.median(forwards), statistics.median(backwards)
        rows.append(
            {
                "batch": batch, "seqlen": seqlen, "heads": heads, "width": width, "mask": mask,
                "variant": name, "forward_ms": round(forward, 4), "backward_ms": round(backward, 4),
                "forward_tflops": round(operations / forward / 1e9, 1),
                "backward_tflops": round(2.5 * operations / backward / 1e9, 1),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,S,H,D,MASK")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which takes long to compile")
    parser.add_argument("--csv", metavar="PATH", help="write every number there")
    arguments = parser.parse_args()
    unknown = {shape.split(",")[-1] for shape in arguments.shapes} - set(MASKS)
    if unknown:
        parser.error(f"a mask is one of {', '.join(MASKS)}, got {', '.join(sorted(unknown))}")
    made_by = setting("attention")
    print("# {gpu}, torch {torch}, triton {triton}, bfloat16: `{command}`".format(**made_by))
    print("| B, S, H, D | mask | " + "TFLOP/s forward / backward |")
    rows = []
    for shape in arguments.shapes:
        *sizes, mask = shape.split(",")
        batch, seqlen, heads, width = map(int, sizes)
        found = measure(batch, seqlen, heads, width, mask, arguments.repeats, not arguments.no_flex)
        cells = [f"{row['variant']} {row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}" for row in found]
        print(f"| {', '.join(sizes)} | {mask} | " + " | ".join(cells) + " |", flush=True)
        rows += found
    if arguments.csv:
        write_csv(arguments.csv, rows, made_by)


if __name__ == "__main__":
    main()
