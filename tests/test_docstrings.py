"""Every exported function explains its arguments, each exported class its fields.

An argument is explained if the docstring of the function (or of the class and its constructor)
names it, or if its name is one of `PLAIN`, which mean the same everywhere. Arguments that the
operations of one package share are explained once, in the package's docstring.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PACKAGES = [
    "allstep",
    *(
        f"allstep.{name}"
        for name in (
            "comm",
            "data",
            "optim",
            "norm",
            "train",
            "torch",
            "models",
            "parallel",
            "kvstore",
        )
    ),
]
PLAIN = {
    *("tensor", "tensors", "model", "optimizer", "parameters", "params", "named_parameters"),
    *("parameter", "name", "names", "path", "shape", "dtype", "device", "args", "kwargs"),
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "host", "world"),
    *("seed", "batch", "epoch", "epochs", "lr", "momentum", "weight_decay", "nesterov", "dropout"),
    *("classes", "num_classes", "channels", "loss", "accuracy", "labels", "images", "target"),
}
"""Names that the field uses with one meaning."""


def exported(package: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes that a package exports."""
    for name in getattr(package, "__all__", ()):
        value = getattr(package, name)
        if (inspect.isclass(value) or inspect.isfunction(value)) and (
            getattr(value, "__module__", "").startswith("allstep")
        ):
            yield name, value


def documentation(value: Any) -> str:
    texts = [inspect.getdoc(value) or ""]
    if inspect.isclass(value):
        texts.append(inspect.getdoc(value.__init__) or "")
        texts += documented_fields(value)
    return "\n".join(texts)


def documented_fields(kind: type) -> list[str]:
    """Return the names of the fields of a class that have a text below them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except OSError:
        return []
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    return [
        field.target.id
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    ]


def unexplained(package: Any, members: Callable[[Any], Any] = exported) -> list[str]:
    """Return what is exported without a docstring, and arguments that none explains."""
    shared = inspect.getdoc(package) or ""
    found = []
    for name, value in members(package):
        text = f"{documentation(value)}\n{shared}"
        if not inspect.getdoc(value):
            found.append(f"{name}: no docstring")
            continue
        if inspect.isclass(value) and issubclass(value, BaseException):
            continue
        for argument in inspect.signature(value).parameters:
            if argument not in PLAIN and not re.search(rf"\b{argument}\b", text):
                found.append(f"{name}: {argument}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_arguments_are_explained(package: str) -> None:
    assert unexplained(importlib.import_module(package)) == []


def test_what_is_not_explained_is_found() -> None:
    def silent(tensor: int, patched: int) -> None: ...

    def explained(tensor: int, patched: int) -> None:
        """Set `patched`."""

    def half(patched: int, other: int) -> None:
        """Set `patched`."""

    package = SimpleNamespace(__doc__="")
    found = unexplained(package, lambda _: [(f.__name__, f) for f in (silent, explained, half)])
    assert found == ["silent: no docstring", "half: other"]


def test_a_text_below_the_last_field_explains_it() -> None:
    @dataclass
    class Documented:
        """A class."""

        patched: int
        """Explained here."""

    package = SimpleNamespace(__doc__="The docstring of the package.")
    assert unexplained(package, lambda _: [("Documented", Documented)]) == []
