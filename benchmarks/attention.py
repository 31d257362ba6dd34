"""Forward and backward of attention beside torch's own, in TFLOP/s, interleaved in one process on random data.

    python -m benchmarks.attention --csv attention.csv            # the shapes of docs/performance.md
    python -m benchmarks.attention --shapes 4,4096,16,128,causal  # batch, length, heads, head width, mask
    python -m benchmarks.attention --masks window varlen --csv attention.csv --append  # keeps the file's other shapes

Masks: causal; full; window (causal, and the 1024 keys before the query's own); varlen (causal, all tokens of the batch
packed into sequences of random lengths that add up to the same).

Variants: "ours" is what backend="auto" runs, "ours_max" the same returning max_logits, "triton" the portable kernels;
SDPA's flash and cuDNN backends; FlexAttention; FlashAttention-4 (flash_attn.cute) where it is installed.

A forward counts 4·D operations for each head's visible pair of query and key, a backward 2.5 times that. The column
matmul_tflops is what torch's product of two random bfloat16 matrices of side 8192 reached in the same process. While
the times of the device are taken it is busy until Python has launched all; what Python takes is in columns of its own.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention import flash_attention, flash_attention_varlen
from benchmarks.common import setting, write_csv

try:
    from flash_attn.cute import flash_attn_func  # FlashAttention-4
except ImportError:
    flash_attn_func = None

SHAPES = [
    "4,4096,16,128,causal",
    "4,4096,16,128,full",
    "1,16384,16,128,causal",
    "1,16384,16,128,full",
    "16,1024,16,128,causal",
    "4,4096,32,64,causal",
    "4,4096,32,64,full",
    "1,16384,32,64,causal",
    "1,16384,32,64,full",
    "16,1024,32,64,causal",
    "4,4096,8,256,causal",
    "4,4096,8,256,full",
    "4,4096,16,128,window",
    "1,16384,16,128,window",
    "4,4096,32,64,window",
    "1,16384,32,64,window",
    "16,1024,16,128,varlen",
    "4,4096,16,128,varlen",
    "1,16384,16,128,varlen",
    "16,1024,32,64,varlen",
    "4,4096,32,64,varlen",
    "1,16384,32,64,varlen",
]
MASKS = ("causal", "full", "window", "varlen")
SIZES = ("batch", "seqlen", "heads", "width")
WINDOW = 1024
SLEEP_CYCLES = 4_000_000  # about 2 ms, so that the device is busy until Python has launched what is measured
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, H, S, D) in and out, as views of (B, S, H, D)
Shape = tuple[int, int, int, int, str]  # batch, length, heads, head width, mask
OURS = {"ours": ("auto", False), "ours_max": ("auto", True), "triton": ("triton", False)}  # backend, with max_logits


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


def ours(batch: int, seqlen: int, mask: str, backend: str, with_max_logits: bool) -> Attend:
    options = {"causal": mask != "full", "return_max_logits": with_max_logits, "backend": backend}
    if mask == "window":
        options["window"] = (WINDOW, 0)
    lengths = packed_lengths(batch, seqlen)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if mask == "varlen":
            packed = (x.squeeze(0) for x in (q, k, v))  # the gradient of x[0] would be copied
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


def flash_attention_4(mask: str) -> Attend:
    options = {"causal": mask != "full"} | ({"window_size": (WINDOW, 0)} if mask == "window" else {})

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def variants(batch: int, seqlen: int, mask: str, with_flex: bool) -> dict[str, Attend]:
    def sdpa(backend: SDPBackend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")

        return attend

    attends = {name: ours(batch, seqlen, mask, *arguments) for name, arguments in OURS.items()}
    if mask in ("causal", "full"):
        attends["sdpa_flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
        attends["sdpa_cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    if with_flex:
        attends["flex"] = flex(batch, seqlen, mask)
    if flash_attn_func and mask != "varlen":
        attends["flash_attention_4"] = flash_attention_4(mask)
    return attends


def inputs(shape: Shape) -> list[Tensor]:
    """q, k, v and a gradient, (B, H, S, D)."""
    batch, seqlen, heads, width, mask = shape
    torch.manual_seed(0)
    sizes = (1, batch * seqlen) if mask == "varlen" else (batch, seqlen)
    tensors = [torch.randn(*sizes, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, grad = (x.transpose(1, 2) for x in tensors)
    return [*(x.requires_grad_() for x in (q, k, v)), grad]


def compile_all(shapes: list[Shape], with_flex: bool) -> None:
    """Fills the caches on disk from many processes. To ours lengths and numbers of heads don't matter."""
    first: dict[tuple[int, str], Shape] = {}
    for shape in shapes:
        first.setdefault(shape[3:], shape)
    cases = [(shape, name) for shape in first.values() for name in OURS]
    cases += [(shape, "flex") for shape in shapes if with_flex]
    workers = min(len(cases), 12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_case, cases))


def compile_case(case: tuple[Shape, str]) -> None:
    (batch, seqlen, _, _, mask), name = shape, _ = case
    q, k, v, grad = inputs(shape)
    inductor.compile_threads = 1  # there are as many processes as processors
    attend = flex(batch, seqlen, mask) if name == "flex" else ours(batch, seqlen, mask, *OURS[name])
    out = attend(q, k, v)
    if name != "ours_max":  # its backward is that of "ours"
        torch.autograd.grad(out, (q, k, v), grad)
    torch.cuda.synchronize()


def milliseconds(function: Callable[[], object]) -> tuple[float, float]:
    """How long it takes the device, which should be busy until all is launched, and how long Python."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    begin = time.perf_counter()
    function()
    python = 1000 * (time.perf_counter() - begin)
    end.record()
    end.synchronize()
    return start.elapsed_time(end), python


def matmul_tflops(repeats: int) -> float:
    """The ceiling: a large product of random matrices."""
    torch.manual_seed(0)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [milliseconds(lambda: a @ b)[0] for _ in range(repeats + 3)]
    return round(2 * 8192**3 / statistics.median(times[3:]) / 1e9, 1)


def measure(shape: Shape, repeats: int, with_flex: bool) -> list[dict]:
    batch, seqlen, heads, width, mask = shape
    q, k, v, grad = inputs(shape)
    attends = variants(batch, seqlen, mask, with_flex)
    flush = torch.empty(2**26, device="cuda", dtype=torch.int32)  # writing it empties the L2 cache
    times: dict[str, list[tuple[float, ...]]] = {}
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
            except (RuntimeError, AssertionError) as error:
                print(f"# {name} can't run {batch},{seqlen},{heads},{width}: {error!r:.200}")
                del attends[name]
                continue
            if repeat >= 3:
                times.setdefault(name, []).append((*forward, *backward))
    operations = 4 * heads * width * visible_pairs(batch, seqlen, mask)
    rows = []
    for name, repeated in times.items():
        forward, forward_python, backward, backward_python = map(statistics.median, zip(*repeated, strict=True))
        rows.append(
            {
                "batch": batch, "seqlen": seqlen, "heads": heads, "width": width, "mask": mask,
                "variant": name, "forward_ms": round(forward, 4), "backward_ms": round(backward, 4),
                "forward_tflops": round(operations / forward / 1e9, 1),
                "backward_tflops": round(2.5 * operations / backward / 1e9, 1),
                "forward_python_ms": round(forward_python, 4), "backward_python_ms": round(backward_python, 4),
            }
        )  # fmt: skip
    return rows


def parse(text: str) -> Shape:
    *sizes, mask = text.split(",")
    if mask not in MASKS or len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"a shape is B,S,H,D and one of {', '.join(MASKS)}, got {text!r}")
    batch, seqlen, heads, width = map(int, sizes)
    return batch, seqlen, heads, width, mask


def rows_of_other_shapes(path: Path, shapes: list[Shape]) -> list[dict]:
    """What the file has and is not measured now."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    measured = {tuple(map(str, shape)) for shape in shapes}
    return [row for row in rows if (*(row[key] for key in SIZES), row["mask"]) not in measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [parse(text) for text in SHAPES]
    parser.add_argument("--shapes", nargs="+", type=parse, default=default, metavar="B,S,H,D,MASK")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=MASKS, help="only the shapes with these")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which takes long to compile")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write every number there")
    parser.add_argument("--append", action="store_true", help="keep the other shapes of the file")
    arguments = parser.parse_args()
    shapes = [shape for shape in arguments.shapes if shape[4] in arguments.masks]
    rows = []
    if arguments.append and arguments.csv and arguments.csv.is_file():
        rows = rows_of_other_shapes(arguments.csv, shapes)
        if rows and "forward_python_ms" not in rows[0]:
            parser.error(f"{arguments.csv} is of an older version of this benchmark and can't be appended to")
    made_by = setting("attention")
    print("# {gpu}, torch {torch}, triton {triton}, bfloat16: `{command}`".format(**made_by))
    if not flash_attn_func:
        print("# FlashAttention-4 (flash_attn.cute) is not installed")
    compile_all(shapes, not arguments.no_flex)
    made_by["matmul_tflops"] = matmul_tflops(arguments.repeats)
    print(f"# a product of 8192 x 8192 matrices: {made_by['matmul_tflops']:.0f} TFLOP/s")
    print("| B, S, H, D | mask | TFLOP/s forward / backward |")
    for shape in shapes:
        found = measure(shape, arguments.repeats, not arguments.no_flex)
        cells = [f"{row['variant']} {row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}" for row in found]
        print(f"| {', '.join(map(str, shape[:4]))} | {shape[4]} | " + " | ".join(cells) + " |", flush=True)
        rows += [row | made_by for row in found]
        if arguments.csv:
            write_csv(arguments.csv, rows, {})


if __name__ == "__main__":
    main()
