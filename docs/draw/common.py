"""How every figure of the docs looks and is saved."""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).parent.parent

plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "docs"})


def save(figure: Figure, folder: Path, name: str) -> None:
    """As SVG, the same bytes whenever nothing has changed."""
    figure.savefig(folder / name, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def folder_argument(description: str | None) -> Path:
    """Where the figures go: beside the pages, unless the command line says otherwise."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER", help="default: docs")
    folder: Path = parser.parse_args().out
    return folder
