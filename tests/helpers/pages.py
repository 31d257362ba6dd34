"""The code blocks of a page of the docs."""

import contextlib
import io
import re
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
BLOCKS = re.compile(r"^```python\n(.*?)^```\n(?:\n?^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def run(page: Path, names: dict) -> list[tuple[str, str]]:
    """Runs the page's python blocks, top to bottom; what the text blocks after them say and what they printed."""
    torch.manual_seed(0)
    found = []
    for number, (code, said) in enumerate(BLOCKS.findall(page.read_text()), 1):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, f"{page.name}, python block {number}", "exec"), names)
        if said:
            found.append((said.rstrip(), output.getvalue().rstrip()))
    return found
