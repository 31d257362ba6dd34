"""What Muon sends and computes on each of many GPUs, and how long a step then takes: a model, not a measurement.

    python -m benchmarks.distributed_model --csv docs/distributed.csv

Bytes follow from the algorithm (tests/distributed counts them), owners are those that the optimizer itself chooses.
Times of one matrix are those measured on one H200 (docs/newton_schulz.csv); the links are assumed, see ``LINKS``.
"""

import argparse
import csv
import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import write_csv
from muon.layout import Matrix, Region, deal

DOCS = Path(__file__).parents[1] / "docs"
NODE = 8  # GPUs that share fast links
LINKS = {  # a GPU's bytes a second in one direction, and seconds that a message takes to set out
    "inside": (360e9, 3e-6),  # NVLink 4: 450 GB/s, of which collectives reach about 80 %
    "across": (40e9, 10e-6),  # InfiniBand NDR, one 400 Gb/s port a GPU, 80 %
}
MEMORY = 4.2e12  # bytes a second that a copy moves on an H200
WIRE = 2  # bytes an element travels in

# (matrices, rows, cols) whose time has been measured, by model.
MODELS = {
    "GPT-2 124M": [(48, 768, 768), (24, 768, 3072)],
    "1.2 B, width 2048": [(96, 2048, 2048), (48, 2048, 8192)],
    "7 B, width 4096": [(128, 4096, 4096), (96, 4096, 14336)],
}


def elements_sent(elements: int, replicas: int, shards: int) -> float:
    """Elements that each rank sends to others in a step, if matrices and shards divide evenly.

    Its share of the matrices, elements / (replicas · shards), comes in from the other shards, goes out to them, and
    each shard of the result goes to the other replicas.
    """
    return elements / (replicas * shards) * (2 * (shards - 1) / shards + replicas - 1)


def elements_of_a_reduction(elements: int, ranks: int) -> float:
    """Elements that each rank sends in one reduce-scatter and one all-gather: what a step may cost at most."""
    return 2 * elements * (ranks - 1) / ranks


@dataclass
class Step:
    """Seconds of one step on the busiest rank."""

    orthogonalize: float
    elementwise: float
    communicate: float

    @property
    def overlapped(self) -> float:
        """With whole buckets on their way while others are computed."""
        return self.elementwise + max(self.orthogonalize, self.communicate)

    @property
    def apart(self) -> float:
        return self.elementwise + self.orthogonalize + self.communicate


def simulate(model: str, replicas: int, shards: int, seconds: dict[tuple[int, int], float]) -> Step:
    """``seconds``: of orthogonalising one (rows, cols) matrix."""
    shapes = [shape[1:] for shape in MODELS[model] for _ in range(shape[0])]
    part = Region(slice(0, 1), slice(None), (1, 0))  # anything but a whole matrix, which would stay where it is
    matrices = [Matrix(i, *shape, [part] * shards, (), False) for i, shape in enumerate(shapes)]
    deal(matrices, replicas, shards)
    busy: dict[tuple[int, int], float] = {}
    for matrix in matrices:
        busy[matrix.owner] = busy.get(matrix.owner, 0.0) + seconds[matrix.rows, matrix.cols]
    elements = sum(rows * cols for rows, cols in shapes)
    # Momentum read and written, gradient read; parameter read and written, update read: 4, 4, 4, 4, 4 and 2 bytes.
    elementwise = 22 * elements / shards / MEMORY
    return Step(max(busy.values()), elementwise, communication(elements, len(MODELS[model]), replicas, shards))


def communication(elements: int, buckets: int, replicas: int, shards: int) -> float:
    """Shards lie side by side, so the groups of up to ``NODE`` shards are inside a node, those of replicas across.

    An all-to-all sends a message to every other rank of its group; a ring all-gather passes on replicas - 1 times, and
    of a node's ranks that pass on at once each uses its own port.
    """
    owned = elements / (replicas * shards) * WIRE
    found = 0.0
    if shards > 1:
        near = min(shards, NODE) - 1
        far = shards - 1 - near
        for count, (rate, delay) in zip((near, far), LINKS.values(), strict=True):
            found += 2 * (owned * count / shards / rate + buckets * count * delay / 8)  # eight messages under way
    if replicas > 1:
        ranks_of_node = max(1, NODE // shards)
        rate, delay = LINKS["inside" if replicas <= ranks_of_node else "across"]
        rate *= 1 if replicas <= ranks_of_node else ranks_of_node
        found += owned * (replicas - 1) / min(rate, LINKS["inside"][0]) + buckets * delay * math.log2(replicas) * 2
    return found


def measured(path: Path) -> dict[tuple[int, int], float]:
    """Seconds of one matrix in a batch, by (rows, cols)."""
    found = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            batch, rows, cols = (int(side) for side in row["shape"].split(" × "))
            found[rows, cols] = float(row["ours_ms"]) / 1e3 / batch
    return found


def layouts(ranks: int) -> dict[str, tuple[int, int]]:
    """(replicas, shards) by name."""
    found = {"DDP": (ranks, 1), "FSDP": (1, ranks)}
    if ranks > NODE:
        found["HSDP"] = ranks // NODE, NODE
    return found


def rows(path: Path) -> list[dict[str, object]]:
    seconds = measured(path)
    table = []
    for model, shapes in MODELS.items():
        elements = sum(count * rows * cols for count, rows, cols in shapes)
        for ranks in [2**i for i in range(11)]:
            for name, (replicas, shards) in layouts(ranks).items():
                step = simulate(model, replicas, shards, seconds)
                table.append(
                    {
                        "model": model,
                        "ranks": ranks,
                        "layout": name,
                        "sent_mb": elements_sent(elements, replicas, shards) * WIRE / 1e6,
                        "reduction_mb": elements_of_a_reduction(elements, ranks) * WIRE / 1e6,
                        "orthogonalize_ms": step.orthogonalize * 1e3,
                        "elementwise_ms": step.elementwise * 1e3,
                        "communicate_ms": step.communicate * 1e3,
                        "step_overlapped_ms": step.overlapped * 1e3,
                        "step_apart_ms": step.apart * 1e3,
                    }
                )
    return table


def draw(table: list[dict[str, object]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(MODELS), figsize=(11, 3.4), layout="constrained")
    for panel, model in zip(axes, MODELS, strict=True):
        for name, color in (("DDP", "#f4a259"), ("FSDP", "#5b8e7d"), ("HSDP", "#4a6fa5")):
            some = [row for row in table if row["model"] == model and row["layout"] == name]
            ranks = [row["ranks"] for row in some]
            low, high = ([row[f"step_{kind}_ms"] for row in some] for kind in ("overlapped", "apart"))
            panel.fill_between(ranks, low, high, color=color, alpha=0.3)
            panel.plot(ranks, low, color=color, marker="o", markersize=3, label=name)
        panel.set(title=model, xlabel="GPUs", xscale="log", yscale="log")
        panel.set_xticks([1, 8, 64, 1024], ["1", "8", "64", "1,024"])
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("simulated step, ms")
    axes[0].legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DOCS / "distributed.csv", help="written, with a figure beside it")
    out = parser.parse_args().csv
    table = rows(DOCS / "newton_schulz.csv")
    made_by = {"command": "python -m benchmarks.distributed_model --csv docs/distributed.csv"}
    write_csv(out, table, made_by)
    draw(table, out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
