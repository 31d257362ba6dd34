"""Time and memory of causal attention, forward and backward, against its length: ours, plain torch, torch's SDPA.

    python -m benchmarks.attention_scaling --csv docs/attention_scaling.csv     # measures, on a GPU
    python -m benchmarks.attention_scaling --report docs/attention_scaling.csv  # puts it into docs/attention.md

Batch 1, 16 heads, 128 wide, bfloat16, random data. At each length the variants run interleaved; medians count. Memory
is the most that was allocated at once in a forward and backward beyond q, k, v and the gradient of the output.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.attention import SLEEP_CYCLES, Attend, milliseconds, variants
from benchmarks.common import setting, write_csv

LENGTHS = [1024 * 2**i for i in range(7)]
HEADS, WIDTH = 16, 128
LABELS = {"ours": "ours", "plain": "plain", "sdpa_flash": "SDPA flash-2", "sdpa_cudnn": "SDPA cuDNN"}
DOCS = Path(__file__).parent.parent / "docs"
Row = dict[str, str]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention (B, H, S, D) with its S × S matrix."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q * q.shape[3] ** -0.5) @ k.mT
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def measure(length: int, attends: dict[str, Attend], repeats: int) -> list[dict]:
    """A row for each variant; one that doesn't run at this length is taken out of ``attends``."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, length, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, grad = (x.transpose(1, 2) for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in attends}
    peaks: dict[str, float] = {}
    for _ in range(repeats + 1):  # the first compiles, and isn't counted
        for name, attend in list(attends.items()):
            try:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                times[name].append(forward_and_backward(attend, q, k, v, grad))
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            except RuntimeError as error:  # out of memory, or not on this GPU
                print(f"# {name} doesn't run at {length}: {str(error).splitlines()[0]}")
                del attends[name]
                torch.cuda.empty_cache()
    rows = []
    for name in attends:
        forward, backward = (statistics.median(column) for column in zip(*times[name][1:], strict=True))
        rows.append(
            {
                "length": length, "variant": name, "forward_ms": round(forward, 4), "backward_ms": round(backward, 4),
                "peak_mib": round(peaks[name], 1),
            }
        )  # fmt: skip
    return rows


def forward_and_backward(attend: Attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[float, float]:
    """Milliseconds of each; the device is kept busy until Python has launched what is measured."""
    out: list[Tensor] = []
    torch.cuda._sleep(SLEEP_CYCLES)
    forward, _ = milliseconds(lambda: out.append(attend(q, k, v)))
    torch.cuda._sleep(SLEEP_CYCLES)
    backward, _ = milliseconds(lambda: torch.autograd.grad(out[0], (q, k, v), grad))
    return forward, backward


def report(path: Path, docs: Path = DOCS) -> None:
    """Draws the CSV file and puts figure and table between the markers of docs/attention.md."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    draw(rows, docs / "attention_scaling.svg")
    page = docs / "attention.md"
    block = f"<!-- attention_scaling -->\n\n{table(rows, path.name)}\n\n<!-- end -->"
    text, count = re.subn(
        "<!-- attention_scaling -->.*?<!-- end -->", lambda _: block, page.read_text(), flags=re.DOTALL
    )
    assert count == 1, f"{page} has {count} places for the figure"
    page.write_text(text)


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "docs"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, label in LABELS.items():
        mine = [row for row in rows if row["variant"] == name]
        lengths = [int(row["length"]) for row in mine]
        left.loglog(lengths, [milliseconds_of(row) for row in mine], marker="o", markersize=3, label=label)
        right.loglog(lengths, [float(row["peak_mib"]) for row in mine], marker="o", markersize=3, label=label)
    left.set(title="forward and backward", ylabel="ms")
    right.set(title="most memory at once, beyond the inputs", ylabel="MiB")
    ticks = sorted({int(row["length"]) for row in rows})
    for axes in (left, right):
        axes.set_xlabel("tokens")
        axes.set_xticks(ticks, [f"{length // 1024}k" for length in ticks])
        axes.minorticks_off()
    left.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def table(rows: list[Row], name: str) -> str:
    found = {(row["length"], row["variant"]): row for row in rows}
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    headings = [f"{label}, {unit}" for unit in ("ms", "MiB") for label in LABELS.values()]
    lines = ["![Time and memory against length](attention_scaling.svg)", ""]
    lines += [f"| tokens | {' | '.join(headings)} |", "|---" * (len(headings) + 1) + "|"]
    for length in lengths:
        mine = [found.get((length, variant)) for variant in LABELS]
        times = [f"{milliseconds_of(row):.2f}" if row else "" for row in mine]
        memory = [f"{float(row['peak_mib']):,.0f}" if row else "" for row in mine]
        lines.append(f"| {int(length):,} | {' | '.join([*times, *memory])} |")
    made_by = "{gpu}, torch {torch}, Triton {triton}: `{command}`".format(**rows[0])
    return "\n".join([*lines, "", f"An empty cell doesn't fit or doesn't run. [{name}]({name}), {made_by}"])


def milliseconds_of(row: Row) -> float:
    return float(row["forward_ms"]) + float(row["backward_ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="S")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write every number there")
    parser.add_argument(
        "--report", type=Path, metavar="PATH", help="measure nothing; write docs/attention.md from this"
    )
    arguments = parser.parse_args()
    if arguments.report:
        report(arguments.report)
        return
    made_by = setting("attention_scaling")
    print("# {gpu}, torch {torch}, triton {triton}: `{command}`".format(**made_by))
    attends = {"plain": plain} | variants(1, max(arguments.lengths), "causal", with_flex=False)
    attends = {name: attends[name] for name in LABELS}
    rows = []
    for length in sorted(arguments.lengths):
        for row in measure(length, attends, arguments.repeats):
            print("{length:6} {variant:11} {forward_ms:9.3f} {backward_ms:9.3f} ms {peak_mib:9.1f} MiB".format(**row))
            rows.append(row)
    if arguments.csv:
        write_csv(arguments.csv, rows, made_by)


if __name__ == "__main__":
    main()
