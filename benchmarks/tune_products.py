"""Times configurations of the products of Newton-Schulz, for the tables in muon/kernels/products.py and operations.py.

    python -m benchmarks.tune_products                          # about a minute on one GPU
    python -m benchmarks.tune_products --shapes 8,2048,2048     # batch, n, m

For each batch of (n, m) matrices: X Xᵀ, bA + cA² and aX + BX in TFLOP/s of every configuration that neither spills nor
disagrees with float64, interleaved, on random float16 data, and of torch's baddbmm. Symmetric products count half of
2 n² k operations, torch's too, which computes all. Beside them stand the clock and the power that the device falls to
under the best one: a large product is bound by power, not by the tensor cores.
"""

import argparse
import statistics
import subprocess
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import setting, write_csv
from benchmarks.newton_schulz import graphed, milliseconds
from muon.kernels import hopper, products
from muon.kernels.products import Config

SHAPES = ["12,768,768", "12,768,3072", "16,1024,4096", "8,2048,2048", "64,1408,2048", "2,4096,14336", "1,8192,8192"]
SYMMETRIC = [Config(128, 128, 64, 4, 3), Config(128, 128, 64, 8, 3), Config(64, 64, 64, 4, 3)]
UPDATE = [Config(128, 128, 64, 4, 3), Config(128, 128, 64, 8, 3), Config(128, 256, 64, 8, 3)]
SPILLING: set[tuple[str, str]] = set()
Product = Callable[[], Tensor]


def candidates(kind: str, A: Tensor, X: Tensor) -> dict[str, Product]:
    if kind == "gram":
        found: dict[str, Product] = {
            _name(c): lambda c=c: products.symmetric_product(X, X, 1.0, config=c) for c in SYMMETRIC
        }
        return found | {
            "hopper": lambda: hopper.symmetric_product(X, X, 1.0),
            "torch": lambda: X @ X.mT,
        }
    if kind == "square":
        found = {_name(c): lambda c=c: products.symmetric_product(A, A, 2.0, (-3.0, A), config=c) for c in SYMMETRIC}
        return found | {
            "hopper": lambda: hopper.symmetric_product(A, A, 2.0, (-3.0, A)),
            "torch": lambda: torch.baddbmm(A, A, A, beta=-3.0, alpha=2.0),
        }
    found = {_name(c): lambda c=c: products.update(A, X, 2.0, config=c) for c in UPDATE}
    return found | {
        "hopper": lambda: hopper.update(A, X, 2.0),
        "torch": lambda: torch.baddbmm(X, A, X, beta=2.0),
    }


def truth(kind: str, A: Tensor, X: Tensor) -> Tensor:
    """Of the last matrix."""
    A, X = A[-1].double(), X[-1].double()
    return {"gram": X @ X.mT, "square": 2 * A @ A - 3 * A, "update": 2 * X + A @ X}[kind]


def compiled() -> set[object]:
    """Every variant of the kernels that this process has launched."""
    kernels = (products.symmetric_product_kernel, products.update_kernel, hopper.product_kernel)
    return {variant for kernel in kernels for variant in kernel.device_caches[0][0].values()}


def under_load(call: Callable[[], object], ms: float) -> tuple[float, float]:
    """SM clock in MHz and power in W while the device does nothing but this for half a second."""
    for _ in range(int(500 / ms) + 1):
        call()
    this = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"  # which need not be the first
    query = ["nvidia-smi", this, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    torch.cuda.synchronize()
    clock, power = map(float, answer.split(","))
    return clock, power


def measure(kind: str, batch: int, n: int, m: int, rounds: int) -> list[dict[str, object]]:
    X = torch.randn(batch, n, m, device="cuda").div_(m**0.5).half()
    A = X @ X.mT
    A = A.tril() + A.tril(-1).mT
    expected = truth(kind, A, X)
    calls: dict[str, Callable[[], object]] = {}
    for name, product in candidates(kind, A, X).items():
        before = compiled()
        error = ((product()[-1].double() - expected).norm() / expected.norm()).item()
        SPILLING.update((kind, name) for variant in compiled() - before if variant.n_spills)
        if error < 1e-3 and (kind, name) not in SPILLING:
            calls[name] = graphed(product)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(milliseconds(call, max(1, int(10 / milliseconds(call, 1)))))
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in medians if name != "torch"), key=lambda name: medians[name])
    clock, power = under_load(calls[best], medians[best])
    operations = batch * n * n * {"gram": m, "square": n, "update": 2 * m}[kind]
    return [
        {
            "shape": f"{batch} × {n} × {m}", "product": kind, "configuration": name, "ms": ms,
            "tflops": operations / ms / 1e9, "clock_mhz": clock if name == best else "",
            "power_w": power if name == best else "",
        }
        for name, ms in medians.items()
    ]  # fmt: skip


def _name(config: Config) -> str:
    return "{}x{}x{} {} warps {} stages".format(*config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="BATCH,N,M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", metavar="PATH", help="write every number there")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for shape in args.shapes:
        for kind in ("gram", "square", "update"):
            found = measure(kind, *map(int, shape.split(",")), rounds=args.rounds)
            rows += found
            rates = ", ".join(f"{row['configuration']}: {row['tflops']:.0f}" for row in found)
            loads = [f"{row['clock_mhz']:.0f} MHz {row['power_w']:.0f} W" for row in found if row["clock_mhz"]]
            print(f"{found[0]['shape']}, {kind}: {rates}; {loads[0]}", flush=True)
    if args.csv:
        write_csv(args.csv, rows, setting("tune_products"))


if __name__ == "__main__":
    main()
