"""Where the time of a training step goes, and what binds it.

    python -m examples.profile                                   # the cpu preset
    python -m examples.profile --preset gpt2-124m --csv docs/results/profile-gpt2-124m.csv
    python -m examples.profile --preset gpt2-124m --no-compile   # by operators instead of fused kernels
    python -m examples.profile --report docs/results/profile-gpt2-124m.csv

Both ideas of this repository began with such a table: attention was bound by memory where nobody had looked. See the
column "above": the milliseconds that an operator takes beyond what its operations and bytes need on this device. Where
it is large and "bound by" says neither, there is something to find.

The operators' times are torch.profiler's; the step's is measured without it, and what is left of that is idle.
Ceilings are measured on the spot. What a row needs at least is counted from the shapes of its arguments; where they
don't tell (kernels in CUDA graphs, the operations of fused element-wise kernels) it says n/a.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from examples import train
from examples.gpt import data, options, roofline, trace
from examples.gpt.cli import ArgumentParser, csv_path, path, pick_device, positive_int, run
from examples.gpt.measure import foreign, milliseconds, read_csv, setting, source, writable, write_csv
from examples.gpt.presets import MODELS, Preset
from examples.gpt.ranks import ALONE
from examples.gpt.roofline import Ceilings

WARM_UP = 8  # steps; by then everything is compiled and Muon's graph recorded
KINDS = (
    "matrix products", "attention forward", "attention backward", "optimizer", "loss", "norms, element-wise, rest",
)  # fmt: skip
LOSS = re.compile(r"log_softmax|nll_loss|cross_entropy|NllLoss|LogSoftmax")
GEMM = re.compile(r"gemm|cutlass|nvjet|triton_tem")  # in a kernel's name, where no operator tells
OPERATOR = re.compile(r"\w+::\w+$")


def parse_arguments(argv: Sequence[str] | None) -> tuple[Namespace, list[str]]:
    """This command's options, and those of examples.train."""
    parser = ArgumentParser(
        prog="python -m examples.profile",
        usage="%(prog)s [options] [options of examples.train]",
        description="Where the time of a training step goes, and what binds it.",
        epilog="Options of examples.train say what is trained: --preset, --optimizer, --attention, --compile...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--top", metavar="N", type=positive_int, default=20, help="rows of the table (20)")
    add("--profiled", metavar="N", type=positive_int, default=5, help="steps to profile (5)")
    add(
        "--csv", metavar="PATH", type=csv_path, default=Path("runs/profile.csv"), help="runs/profile.csv; figure beside"
    )
    add("--report", metavar="PATH", type=path, help="table and figure of such a CSV, measuring nothing")
    return parser.parse_known_args(argv)


@dataclass
class Row:
    """An operator on arguments of certain shapes, or a kernel; everything is of one step."""

    kind: str
    operator: str
    shapes: str
    calls: float = 0
    ms: float = 0
    flops: float | None = None
    bytes: float | None = None

    @property
    def name(self) -> str:
        return f"{self.operator} {self.shapes}".strip()


def step_to_profile(args: Namespace, preset: Preset, device: torch.device) -> Callable[[], object]:
    """A training step as examples.train takes it, compiled and warmed up."""
    corpus = data.load(args.data, preset.context, preset.tokenizer)
    preset = dataclasses.replace(preset, vocab_size=max(preset.vocab_size, corpus.tokenizer.vocab_size))
    torch.manual_seed(args.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = MODELS[preset.architecture](**train.model_shape(preset, args.attention)).to(device)
    state = train.make_state(model, preset, args.optimizer, device, ALONE)
    compiled = torch.compile(model) if preset.compile else model
    numbers = itertools.count()

    def step() -> object:
        batch = data.training_batch(corpus.train, preset.sequences, preset.context, seed=args.seed, step=next(numbers))
        return train.train_step(
            compiled, state.optimizer, state.scheduler, data.to_device(batch, device), preset.dtype,
            micro_batch=preset.batch, clip=preset.clip, scaler=state.scaler,
        )  # fmt: skip

    for _ in range(WARM_UP):
        step()
    return step


def traced(step: Callable[[], object], steps: int, device: torch.device) -> list[trace.Work]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        milliseconds(device, lambda: [step() for _ in range(steps)])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return trace.read(json.loads(file.read_text())["traceEvents"])


def rows_of(work: Iterable[trace.Work], steps: int) -> list[Row]:
    """Work under the same name on the same shapes together, a step's share of it; the longest first."""
    rows: dict[tuple[str, str, str], Row] = {}
    counted: set[int] = set()
    for piece in work:
        name, call = named(piece)
        shapes = [shape for shape in call.shapes if shape and isinstance(shape[0], int)] if call else []
        key = (kind(piece, name), short(name), " ".join("x".join(map(str, shape)) for shape in shapes[:3]))
        row = rows.setdefault(key, Row(*key))
        row.ms += piece.microseconds / 1e3 / steps
        if id(call or piece) in counted:
            continue  # another kernel of the same call
        counted.add(id(call or piece))
        row.calls += 1 / steps
        if call is not None:
            flops, bytes_ = roofline.cost(name, call.shapes, call.types)
            row.flops = None if flops is None else (row.flops or 0) + flops / steps
            row.bytes = None if bytes_ is None else (row.bytes or 0) + bytes_ / steps
    return sorted(rows.values(), key=lambda row: -row.ms)


def named(piece: trace.Work) -> tuple[str, trace.Call | None]:
    """What work is listed under, and the call whose arguments tell what it needed.

    All that an attention operator does is its own. A kernel goes under the operator that launched it, except those that
    torch.compile has made and those of CUDA graphs: they have names of their own.
    """
    calls = list(piece.call.chain()) if piece.call else []
    attention = [call for call in calls if roofline.ATTENTION.match(call.name)]
    call = attention[-1] if attention else piece.call
    if call is not None and (piece.kernel is None or OPERATOR.match(call.name)):
        return call.name, call
    assert piece.kernel is not None
    return piece.kernel, call if call is not None and call.name.startswith("triton") else None


def kind(piece: trace.Work, name: str) -> str:
    if piece.call and any(call.name.startswith("Optimizer.step") for call in piece.call.chain()):
        return "optimizer"
    if roofline.ATTENTION.match(name):
        return "attention backward" if roofline.is_backward(name) else "attention forward"
    if name in roofline.MATMUL or GEMM.search(name):
        return "matrix products"
    return "loss" if LOSS.search(name) else "norms, element-wise, rest"


def short(name: str) -> str:
    """Without its arguments, namespaces and templates."""
    return re.split(r"[<(]", name.removeprefix("aten::").removeprefix("void "))[0]


def table(rows: Sequence[Row], step_ms: float, ceilings: Ceilings, top: int) -> str:
    """The longest rows, and the sums by kind."""
    busy = sum(row.ms for row in rows)
    whole = max(step_ms, busy)
    lines = ["    ms  share  calls    GFLOP       MB  FLOP/B  above  bound by  operator"]
    for row in rows[:top]:
        gflop, megabytes = scaled(row.flops, 1e9, ".1f"), scaled(row.bytes, 1e6, ".1f")
        intensity = "n/a" if row.flops is None or row.bytes is None else f"{row.flops / row.bytes:.0f}"
        lines.append(
            f"{row.ms:6.2f} {row.ms / whole:5.0%} {row.calls:6.0f} {gflop:>8s} {megabytes:>8s} {intensity:>7s} "
            f"{above(row, ceilings):>6s}  {roofline.binds(row.ms, row.flops, row.bytes, ceilings):8s}  {row.name[:80]}"
        )
    lines += ["", "    ms  share  kind"]
    sums = {kind: sum(row.ms for row in rows if row.kind == kind) for kind in KINDS}
    sums["idle"] = whole - busy
    lines += [f"{ms:6.2f} {ms / whole:5.0%}  {kind}" for kind, ms in sums.items()]
    lines += [f"{step_ms:6.2f}        a step without the profiler", ""]
    peak, bandwidth = f"{ceilings.flops / 1e12:.3g} TFLOP/s", f"{ceilings.bandwidth / 1e9:,.0f} GB/s"
    lines.append(f"ceilings: {peak} and {bandwidth}, which meet at {ceilings.flops / ceilings.bandwidth:.0f} FLOP/B")
    return "\n".join(lines)


def scaled(value: float | None, unit: float, style: str) -> str:
    return "n/a" if value is None else format(value / unit, style)


def above(row: Row, ceilings: Ceilings) -> str:
    """Milliseconds beyond what the device needs for it."""
    floor = roofline.floor_ms(row.flops, row.bytes, ceilings)
    return "n/a" if floor is None else f"{max(0.0, row.ms - floor):.2f}"


def report(csv_path: Path, top: int = 20) -> str:
    """Draws the figure beside the CSV; returns the table."""
    found = read_csv(csv_path, "operator")
    first = found[0]
    try:
        rows = [
            Row(
                *(one[name] for name in ("kind", "operator", "shapes")),
                *(float(one[name]) for name in ("calls", "ms")),
                *(float(one[name]) if one[name] else None for name in ("flops", "bytes")),
            )
            for one in found
        ]
        ceilings = Ceilings(float(first["ceiling_flops"]), float(first["ceiling_bandwidth"]))
    except (KeyError, TypeError, ValueError) as error:
        raise foreign(csv_path) from error
    roofline.draw(rows, ceilings, f"{first['run']}, {first['device']}", csv_path.with_suffix(".png"))
    return f"{table(rows, float(first['step_ms']), ceilings, top)}\n\n{first['run']}. {source(csv_path, first)}"


def main(argv: Sequence[str] | None = None) -> str:
    """The whole profile; returns its table."""
    args, rest = parse_arguments(argv)
    if args.report is None:
        measure(args, rest, argv)
    text = report(args.report or args.csv, args.top)
    print(text)
    return text


def measure(args: Namespace, rest: list[str], argv: Sequence[str] | None) -> None:
    """Everything that the report needs goes into the CSV."""
    training, preset, _ = options.parse(rest)
    device = pick_device(training.device)
    writable(args.csv)
    step = step_to_profile(training, preset, device)
    step_ms = milliseconds(device, lambda: [step() for _ in range(args.profiled)]) / args.profiled
    rows = rows_of(traced(step, args.profiled, device), args.profiled)
    ceilings = roofline.measure(device, getattr(torch, preset.dtype))
    names = [training.preset, training.optimizer, f"{training.attention} attention", preset.dtype]
    whole = {
        "run": ", ".join([*names, "compiled" if preset.compile else "not compiled"]),
        "step_ms": step_ms,
        "ceiling_flops": ceilings.flops,
        "ceiling_bandwidth": ceilings.bandwidth,
    }
    write_csv(args.csv, [vars(row) | whole for row in rows], setting("examples.profile", argv, device))


if __name__ == "__main__":
    run(main)
