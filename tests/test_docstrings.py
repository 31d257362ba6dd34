"""Every example in a public docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import attention
import muon

MODULES = [
    info.name
    for package in (muon, attention)
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if ".kernels" not in info.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("package", [muon, attention])
def test_public_objects_have_an_example(package):
    for name in package.__all__:
        public = getattr(package, name)
        if callable(public):
            assert ">>>" in (public.__doc__ or ""), f"{package.__name__}.{name} has no example"
