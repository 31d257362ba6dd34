"""What compiles for Hopper with the Triton that is installed compiles with the oldest one that is supported."""

import pytest
from helpers.sm90 import OLDEST_TRITON, run_uninterpreted

from tests.attention import test_compile_hopper, test_compile_hopper_backward
from tests.muon import test_compile_sm90

PAGES = (test_compile_hopper, test_compile_hopper_backward, test_compile_sm90)


@pytest.mark.skipif(not OLDEST_TRITON.exists(), reason="needs Triton 3.6 beside the installed one, as from `make test`")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.__name__.rpartition(".")[2])
def test_kernels_compile(page):
    """Its assembler may spill a few bytes where the newer one doesn't."""
    version, *lines = run_uninterpreted("import triton; print(triton.__version__)\n" + page.SCRIPT, OLDEST_TRITON)
    assert version == "3.6.0"
    assert lines and [line for line in lines if not line.endswith("ok") and "spills" not in line] == []
