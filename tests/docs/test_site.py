"""The site builds without a warning, has a page for everything public, and asks the network for nothing."""

import os
import re
import subprocess
import sys

import pytest
from helpers.pages import ROOT

import attention
import muon

pytest.importorskip("mkdocs", reason="the site is built with mkdocs: pip install -e .[docs]")
pytest.importorskip("mkdocstrings", reason="the API reference is built with mkdocstrings: pip install -e .[docs]")

LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(https?:)?//|<link[^>]*stylesheet[^>]*//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.parametrize("package", [muon, attention], ids=lambda package: package.__name__)
def test_everything_public_is_in_the_reference(site, package):
    page = (site / "api" / f"{package.__name__}.html").read_text()
    for name in package.__all__:
        assert f'id="{package.__name__}.{name}"' in page or f"<code>{package.__name__}.{name}</code>" in page


def test_nothing_is_loaded_from_elsewhere(site):
    assert LOADED.search('<script async src="https://cdn.example/x.js"></script>')
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        assert not LOADED.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text()), style
