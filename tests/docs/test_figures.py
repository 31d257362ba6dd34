"""The scripts that draw the docs' figures run, and the pages quote what they print."""

import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="the docs' figures are drawn with matplotlib")

from helpers.pages import ROOT

from benchmarks import attention_scaling, report, report_attention
from benchmarks.common import write_csv
from docs.draw import attention as draw_attention
from docs.draw import muon as draw_muon

DOCS = ROOT / "docs"


def assert_quoted(page, printed):
    assert printed.strip()
    quoted = [line.strip() for line in (DOCS / page).read_text().splitlines()]
    for line in printed.splitlines():
        assert line.strip() in quoted


def test_tiles_and_online_softmax(tmp_path, capsys):
    draw_attention.draw_tiles(tmp_path)
    assert_quoted("attention.md", capsys.readouterr().out)
    draw_attention.draw_online_softmax(tmp_path)
    assert "out = a / l" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"attention_tiles.svg", "attention_online_softmax.svg"}


def test_polynomials_ball_and_costs(tmp_path, capsys):
    for draw in (draw_muon.draw_polynomials, draw_muon.draw_ball, draw_muon.draw_costs):
        draw(tmp_path)
    assert_quoted("muon-in-ten-minutes.md", capsys.readouterr().out)
    assert len(list(tmp_path.iterdir())) == 3


def test_singular_values_of_the_example(tmp_path, capsys):
    """After two steps instead of sixty, on the library of any Python: the form of the lines, not their figures."""
    draw_muon.draw_singular_values(draw_muon.momentum_of_the_example(2), 2, tmp_path)  # the first gradient is zero
    shape = re.sub(r"\d[\d.]*", "0", capsys.readouterr().out)
    page = re.sub(r"\d[\d.]*", "0", (DOCS / "muon-in-ten-minutes.md").read_text())
    for line in shape.splitlines():
        assert line in page


def test_costs_are_the_products_of_the_iterations():
    """Counted by the operations of the iterations themselves, symmetric products as half."""
    from muon.newton_schulz import TorchOperations, gram_iteration, segments, standard_iteration
    from muon.polynomials import schedule

    class Counting(TorchOperations):
        operations = 0

        def gram(self, X):
            self.operations += X.shape[1] ** 2 * X.shape[2]
            return super().gram(X)

        def symmetric(self, A, B, alpha, *terms):
            self.operations += A.shape[1] ** 3
            return super().symmetric(A, B, alpha, *terms)

        def update(self, B, X, a, out=None):
            self.operations += 2 * X.shape[1] ** 2 * X.shape[2]
            return super().update(B, X, a, out)

    n, ratio = 4, 3
    for preset in ("keller_jordan", "converged"):
        steps = schedule(preset, 5)
        X = torch.randn(1, n, ratio * n).double()
        standard, gram = Counting(), Counting()
        standard_iteration(X / X.norm(), steps, standard)
        gram_iteration(X / X.norm(), steps, gram)
        assert standard.operations == draw_muon.standard_cost(len(steps), ratio) * n**3
        assert gram.operations == draw_muon.gram_cost([len(part) for part in segments(steps)], ratio) * n**3


def test_every_picture_is_there():
    for page in DOCS.rglob("*.md"):
        for name in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text()):
            assert (page.parent / name).is_file(), f"{page.name} shows {name}"


def test_plain_attention_is_the_others():
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    expected = attention_scaling.plain(q, k, v)
    torch.testing.assert_close(
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), expected, rtol=1e-5, atol=1e-5
    )


def test_the_report_of_attention_scaling(tmp_path):
    made_by = {"gpu": "a GPU", "torch": "2", "triton": "3", "command": "python"}
    rows = [
        {"length": length, "variant": name, "forward_ms": length / 1e3, "backward_ms": length / 500, "peak_mib": length}
        for length in (1024, 2048)
        for name in attention_scaling.LABELS
        if (length, name) != (2048, "plain")
    ]
    write_csv(tmp_path / "scaling.csv", rows, made_by)
    shutil.copy(DOCS / "attention.md", tmp_path)
    attention_scaling.report(tmp_path / "scaling.csv", tmp_path)
    once = (tmp_path / "attention.md").read_text()
    assert "| 2,048 | 6.14 |  | 6.14 | 6.14 | 2,048 |  | 2,048 | 2,048 |" in once
    assert (tmp_path / "attention_scaling.svg").is_file()
    attention_scaling.report(tmp_path / "scaling.csv", tmp_path)
    assert (tmp_path / "attention.md").read_text() == once


def rows_of_attention(mask, ours, cudnn, flex):
    """As benchmarks.attention writes them; forward and backward in TFLOP/s."""
    made_by = {"gpu": "a GPU", "torch": "2", "triton": "3", "command": f"python {mask}", "matmul_tflops": "800"}
    shape = {"batch": "4", "seqlen": "4096", "heads": "32", "width": "64", "mask": mask}
    speeds = {"ours": ours, "ours_max": ours, "sdpa_cudnn": cudnn, "flex": flex}
    return [
        shape | made_by | {
            "variant": name, "backward_tflops": str(speed[1]),
            "forward_tflops": str(speed[0] / 1.01 if name == "ours_max" else speed[0]),
        }
        for name, speed in speeds.items() if speed
    ]  # fmt: skip


def test_the_report_of_attention(tmp_path):
    rows = rows_of_attention("causal", (480, 400), (400, 500), (240, 200))
    rows += rows_of_attention("full", (500, 440), (500, 400), (400, 200))
    rows += rows_of_attention("window", (400, 200), None, (200, 200))
    text = report_attention.ratios(rows, tmp_path / "attention.png")
    assert "| 4, 4096, 32, 64 | causal | 1.20 | 1.05 | 0.80 | 1.05 | 60% / 50% |" in text
    assert "| 4, 4096, 32, 64 | window |  |  |  |  | 50% / 25% |" in text
    assert "| window | 2.00 (4, 4096, 32, 64) | 1.00 (4, 4096, 32, 64) |" in text
    assert "`return_max_logits` costs at most 1.0% of a forward" in text
    assert (tmp_path / "attention.png").is_file()
    assert "| 4, 4096, 32, 64 | 480 / 400 | 400 / 500 | 240 / 200 |" in report_attention.short(rows)
    table = report.table("attention", report.beside_each_other("attention", rows))
    assert "| 4, 4096, 32, 64 | window | 400 / 200 | 396 / 200 | 200 / 200 |  |" in table
    assert table.endswith("`python causal`, `python full`, `python window`")


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/results.md", "README.md"])
def test_pages_say_what_the_report_writes(tmp_path, page):
    """So a CSV file isn't replaced without its tables."""
    copy = shutil.copy(ROOT / page, tmp_path)
    report.fill(Path(copy), figures=tmp_path)
    assert Path(copy).read_text() == (ROOT / page).read_text()
