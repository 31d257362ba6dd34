"""Every public docstring has its sections, and its examples run and print what they say."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import attention
import muon
import muon.polynomials

MODULES = [
    info.name
    for package in (muon, attention)
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if ".kernels" not in info.name
]
PUBLIC = [getattr(package, name) for package in (muon, attention) for name in package.__all__]
PUBLIC = [public for public in PUBLIC if callable(public)] + [muon.polynomials.schedule, muon.polynomials.output_range]
METHODS = [
    method
    for public in PUBLIC
    if inspect.isclass(public)
    for name, method in vars(public).items()
    if inspect.isfunction(method) and not name.startswith("_")
]


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def missing(function, is_method=False):
    """What the docstring lacks: sections, and in Args parameters."""
    doc = inspect.getdoc(function) or ""
    arguments = re.search(r"^Args:\n((?: +.*\n|\n)*)", doc + "\n", re.MULTILINE)
    named = re.findall(r"^    (\w+(?:, \w+)*):", arguments[1] if arguments else "", re.MULTILINE)
    lacking = sorted(set(parameters(function)) - {name for names in named for name in names.split(", ")})
    returns = None if inspect.isclass(function) else inspect.signature(function).return_annotation
    needed = {
        "Returns:": returns not in (None, "None"),
        "Raises:": "raise " in inspect.getsource(function),
        "Example:": not is_method,
        "Source": not is_method,
    }
    return lacking + [name for name, is_needed in needed.items() if is_needed and not re.search(f"^{name}", doc, re.M)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__qualname__)
def test_sections(public):
    assert missing(public) == []
    assert re.search(r"^Example:\n+ +>>>", inspect.getdoc(public), re.MULTILINE)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_methods(method):
    """One line may do, if it names every parameter, and says what is raised."""
    doc = inspect.getdoc(method) or ""
    if method.__module__.startswith("muon"):
        assert missing(method, is_method=True) == []
    assert doc and all(re.search(rf"\b{name}\b", doc) for name in parameters(method))
    assert "raise" in doc.lower() or "raise " not in inspect.getsource(method)


def test_what_is_missing_is_found():
    def silent(a, b: int) -> int:
        """Adds.

        Args:
            a: a number.
        """
        if b < 0:
            raise ValueError(b)
        return a + b

    assert missing(silent) == ["b", "Returns:", "Raises:", "Example:", "Source"]
