"""Every python block of README and docs runs, and prints what the text block after it says."""

import pytest
import torch
from helpers.pages import BLOCKS, ROOT, run

PAGES = sorted({*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"})


def names_that_readme_leaves_to_its_reader():
    model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
    q, k, v = torch.randn(3, 1, 4, 2, 16)
    return {"model": model, "q": q, "k": k, "v": v}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks(page):
    for said, printed in run(page, names_that_readme_leaves_to_its_reader() if page.name == "README.md" else {}):
        assert printed == said


def test_blocks_are_found():
    text = "```python\n1\n```\n\n```text\none\n```\n\n```python\n2\n```\n"
    assert BLOCKS.findall(text) == [("1\n", "one\n"), ("2\n", "")]
