"""Forward and backward of attention beside torch's own, in TFLOP/s, interleaved in one process on random data.

    python -m benchmarks.attention --csv attention.csv            # the shapes of docs/performance.md
    python -m benchmarks.attention --shapes 4,4096,16,128,causal  # batch, length, heads, head width, mask

A forward counts 4·B·H·S²·D operations (half of it when causal), a backward 2.5 times that.
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

from attention import flash_attention
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
]
SLEEP_CYCLES = 4_000_000  # about 2 ms, so that the device is busy until Python has launched what is measured
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, H, S, D) in and out, as views of (B, S, H, D)


def variants(seqlen: int, causal: bool, with_flex: bool) -> dict[str, Attend]:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, backend="triton")
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    def sdpa(backend: SDPBackend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return attend

    attends: dict[str, Attend] = {"triton": ours, "sdpa_flash": sdpa(SDPBackend.FLASH_ATTENTION)}
    attends["sdpa_cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    if with_flex:
        mask = None
        if causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device="cuda")
        flex = torch.compile(flex_attention, dynamic=False)
        attends["flex"] = lambda q, k, v: flex(q, k, v, block_mask=mask)
    return attends


def milliseconds(function: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(batch: int, seqlen: int, heads: int, width: int, causal: bool, repeats: int, with_flex: bool) -> list[dict]:
    torch.manual_seed(0)
    tensors = [torch.randn(batch, seqlen, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, grad = (x.transpose(1, 2) for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    attends = variants(seqlen, causal, with_flex)
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
    operations = 4 * batch * heads * seqlen**2 * width * (0.5 if causal else 1.0)
    rows = []
    for name, (forwards, backwards) in times.items():
        forward, backward = statistics.median(forwards), statistics.median(backwards)
        rows.append(
            {
                "batch": batch, "seqlen": seqlen, "heads": heads, "width": width,
                "mask": "causal" if causal else "full",
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
    made_by = setting("attention")
    print("# {gpu}, torch {torch}, triton {triton}, bfloat16: `{command}`".format(**made_by))
    print("| B, S, H, D | mask | " + "TFLOP/s forward / backward |")
    rows = []
    for shape in arguments.shapes:
        *sizes, mask = shape.split(",")
        batch, seqlen, heads, width = map(int, sizes)
        found = measure(batch, seqlen, heads, width, mask == "causal", arguments.repeats, not arguments.no_flex)
        cells = [f"{row['variant']} {row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}" for row in found]
        print(f"| {', '.join(sizes)} | {mask} | " + " | ".join(cells) + " |", flush=True)
        rows += found
    if arguments.csv:
        write_csv(arguments.csv, rows, made_by)


if __name__ == "__main__":
    main()
