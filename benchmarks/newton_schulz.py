"""Milliseconds to orthogonalise a batch of matrices, beside the ways people do it today.

    python -m benchmarks.newton_schulz --csv docs/newton_schulz.csv

Everything runs interleaved in one process on random bfloat16 matrices, five Keller Jordan steps; the median counts.
microsoft/dion and Dao-AILab/gram-newton-schulz take part where they are installed.
The floor is what the cheaper iteration needs at the rate that a large bfloat16 product runs at on this device,
symmetric products counted as half; `copy` is reading the batch and writing it back at memory speed.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from benchmarks.common import setting, write_csv
from muon import orthogonalize
from muon.newton_schulz import segments
from muon.polynomials import KELLER_JORDAN, schedule

SHAPES = [
    "12,768,768",
    "12,768,3072",
    "12,3072,768",
    "16,1024,1024",
    "16,1024,4096",
    "8,2048,2048",
    "8,2048,8192",
    "64,1408,2048",
    "4,4096,4096",
    "2,4096,14336",
    "1,8192,8192",
    "4096,64,768",
]
STEPS = schedule(KELLER_JORDAN, 5)


def torch_loop(G: Tensor) -> list[Tensor]:
    """What torch.optim.Muon does with each of its matrices."""
    return [_zeropower_via_newtonschulz(matrix.clone(), KELLER_JORDAN, 5, 1e-7) for matrix in G]


def plain_bmm(G: Tensor) -> Tensor:
    """The iteration as one writes it in torch, batched; to be compiled."""
    X = G.mT if G.shape[1] > G.shape[2] else G
    X = X / (X.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for a, b, c in STEPS:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if G.shape[1] > G.shape[2] else X


def installed_peers() -> dict[str, Callable[[Tensor], Tensor]]:
    """Other packages' batched iterations, where they are installed; dion's has coefficients of its own."""
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    if importlib.util.find_spec("dion"):
        from dion.newton_schulz_triton import newton_schulz_triton

        found["dion"] = newton_schulz_triton
    if importlib.util.find_spec("gram_newton_schulz"):
        from gram_newton_schulz import GramNewtonSchulz

        # Restarts where Keller Jordan's coefficients want one.
        coefficients = [list(triple) for triple in STEPS]
        found["gram-newton-schulz"] = GramNewtonSchulz(
            ns_coefficients=coefficients, gram_newton_schulz_reset_iterations=[3]
        )
    return found


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """Replays what ``call`` launches, so that Python's time doesn't count, as in the optimizer's step."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def floor_ms(batch: int, n: int, m: int, flops_per_ms: float) -> float:
    ratio = m / n  # what follows is in units of n³ floating-point operations
    standard = len(STEPS) * (3 * ratio + 1)
    gram = sum(3 * ratio + 4 * len(segment) - 3 for segment in segments(STEPS))
    return batch * n**3 * min(standard, gram) / flops_per_ms


def singular_values(X: Tensor) -> tuple[float, float]:
    S = torch.linalg.svdvals(X[-1].float())
    return S.min().item(), S.max().item()


def measure(
    batch: int, rows: int, cols: int, rounds: int, flops_per_ms: float, bytes_per_ms: float
) -> dict[str, object]:
    G = torch.randn(batch, rows, cols, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()  # or the ninth shape would be one too many to compile
    compiled_bmm = torch.compile(plain_bmm, dynamic=False)
    calls = {"ours": graphed(lambda: orthogonalize(G)), "compiled bmm": graphed(lambda: compiled_bmm(G))}
    calls |= {name: graphed(lambda peer=peer: peer(G)) for name, peer in installed_peers().items()}
    if batch <= 64:
        calls["torch.optim.Muon"] = lambda: torch_loop(G)
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = max(1, int(5 / milliseconds(calls["ours"], 2)))
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(milliseconds(call, repeats if name != "torch.optim.Muon" else 1))
    medians = {name: statistics.median(values) for name, values in times.items()}
    peer = min(value for name, value in medians.items() if name != "ours")
    n, m = min(rows, cols), max(rows, cols)
    low, high = singular_values(orthogonalize(G))
    return {
        "shape": f"{batch} × {rows} × {cols}",
        "ours_ms": medians["ours"],
        "compiled_bmm_ms": medians["compiled bmm"],
        "torch_optim_muon_ms": medians.get("torch.optim.Muon"),
        "dion_ms": medians.get("dion"),
        "gram_newton_schulz_ms": medians.get("gram-newton-schulz"),
        "speedup": peer / medians["ours"],
        "floor_ms": floor_ms(batch, n, m, flops_per_ms),
        "copy_ms": 4 * G.numel() / bytes_per_ms,
        "smallest_singular_value": low,
        "largest_singular_value": high,
    }


def ceilings() -> tuple[float, float]:
    """FLOP and bytes a millisecond of a large product and a large copy."""
    A = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = statistics.median(milliseconds(lambda: A @ A, 5) for _ in range(5))
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = statistics.median(milliseconds(lambda: target.copy_(source), 5) for _ in range(5))
    return 2 * 8192**3 / product, 4 * source.numel() / copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="BATCH,ROWS,COLS")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", metavar="PATH", help="write every number there")
    args = parser.parse_args()
    torch.manual_seed(0)
    flops, bandwidth = ceilings()
    print(f"ceilings: {flops / 1e9:.0f} TFLOP/s, {bandwidth / 1e9:.2f} TB/s")
    print("| batch × rows × cols | ours, ms | compiled bmm | torch.optim.Muon | speed-up | of the floor | copy | S |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for shape in args.shapes:
        row = measure(*map(int, shape.split(",")), rounds=args.rounds, flops_per_ms=flops, bytes_per_ms=bandwidth)
        rows.append(row)
        loop = f"{row['torch_optim_muon_ms']:.2f}" if row["torch_optim_muon_ms"] else ""
        cells = (
            "| {shape} | {ours_ms:.3f} | {compiled_bmm_ms:.3f} | {loop} | {speedup:.2f} | {fraction:.0%} "
            "| {copy_ms:.3f} | {smallest_singular_value:.2f} to {largest_singular_value:.2f} |"
        )
        print(cells.format(**row, loop=loop, fraction=row["floor_ms"] / row["ours_ms"]), flush=True)
    made_by = setting("newton_schulz") | {"tflops": flops / 1e9, "tbytes_per_second": bandwidth / 1e9}
    print("{gpu}, torch {torch}, triton {triton}: `{command}`".format(**made_by))
    if args.csv:
        write_csv(args.csv, rows, made_by)


if __name__ == "__main__":
    main()
