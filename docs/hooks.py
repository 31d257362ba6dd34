"""What `make docs` adds to MkDocs: pages made of files outside docs/, and docstrings as its parser wants them.

The pages of docs/ link to the repository's files the way that a repository browser follows (`../muon/matrices.py`).
In the site every such file is a page of its own, and the links lead there.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
SOURCES = (
    "muon/**/*.py",
    "attention/**/*.py",
    "examples/**/*.py",
    "benchmarks/*.py",
    "docs/draw/*.py",
    "tests/docs/*.py",
)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    names = sorted(str(path.relative_to(ROOT)) for pattern in SOURCES for path in ROOT.glob(pattern))
    for name in names:
        files.append(File.generated(config, f"source/{name}.md", content=source_page(name)))
    index = "\n".join(["# Source", "", *(f"- [{name}](source/{name}.md)" for name in names)])
    files.append(File.generated(config, "source.md", content=index))
    return files


def source_page(name: str) -> str:
    header = f"---\ntitle: {name}\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    return f"{header}````python\n{(ROOT / name).read_text()}````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith("source"):
        return markdown
    folder = ROOT if page.file.src_uri in PAGES else ROOT / "docs" / PurePosixPath(page.file.src_uri).parent
    depth = len(PurePosixPath(page.file.src_uri).parents) - 1
    return LINK.sub(lambda match: "../" * depth + place_in_site((folder / match[1]).resolve()), markdown)


def place_in_site(path: Path) -> str:
    """Where a file of the repository is in the site, relative to the site's root."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return "source.md"
    if name.startswith("docs/") and path.suffix != ".py":
        return name.removeprefix("docs/")
    return name if name in PAGES else f"source/{name}.md"


class Docstrings(griffe.Extension):
    """`Example:` is a section of its own."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
