"""Fills docs/results.md from the CSV files in docs/results, and draws their figures beside them.

    python -m docs.draw.results

A table stands between two markers that name its file; a marker without a file yet stays as it is.
"""

import csv
import re
from pathlib import Path

from docs.draw.common import DOCS
from examples import compare, profile


def fill(page: Path, folder: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"<!-- (?!end)([\w-]+) -->\n", text):
        if (folder / f"{name}.csv").is_file():
            block = f"<!-- {name} -->\n\n{result(folder / f'{name}.csv')}\n\n<!-- end -->"
            text = re.sub(f"<!-- {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
    page.write_text(text)


def result(path: Path) -> str:
    """Table and figure."""
    with path.open(newline="") as file:
        is_profile = "operator" in next(csv.reader(file))
    text = f"```text\n{profile.report(path)}\n```" if is_profile else compare.report(path)[0]
    return f"{text}\n\n![{path.stem}]({path.parent.name}/{path.stem}.png)"


if __name__ == "__main__":
    fill(DOCS / "results.md", DOCS / "results")
