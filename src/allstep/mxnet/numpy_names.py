"""Names that numpy has removed and MXNet 1.9.1 still reads: replacements, set just before MXNet is
imported.

MXNet is retired; its last release was made for numpy 1.23 or older. About 25 removed names are all
that keeps it from running on a current numpy. `install` adds an import hook for the module `mxnet`
alone: a process that never imports MXNet keeps an unchanged numpy, and a name that numpy has is
never replaced.

```
import mxnet  ->  the hook finds MXNet as Python would
              ->  adds the missing names to numpy        (only when mxnet is executed, not found)
              ->  limits MXNet's threads to the worker's share (`framework_threads`)
              ->  executes mxnet
```

This module itself imports nothing but the standard library, so a `sitecustomize` may load it by its
path at the start of an interpreter, without allstep's packages.
"""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

KNOWN_TO_WORK = "1.23.5"
"""A version of numpy that has all names that MXNet 1.9.1 reads."""

_MODULE = "mxnet"
_MISSING_NAME = re.compile(
    r"`np\.(\w+)` was removed|module 'numpy[\w.]*' has no attribute '(\w+)'"
    r"|cannot import name '(\w+)' from 'numpy"
)


def install() -> None:
    """Add the import hook for `mxnet` to this process; a second call changes nothing."""
    # By name, since this file may have been loaded twice (see above).
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def add_missing_names(numpy: ModuleType) -> list[str]:
    """Add replacements for the names that this numpy does not have, and return these names."""
    added = [name for name in _REPLACEMENTS if not _has(numpy, name)]
    for name in added:
        setattr(numpy, name, _REPLACEMENTS[name](numpy))
    return added


def _has(numpy: ModuleType, name: str) -> bool:
    """Return whether numpy has a name; some versions warn when a removed name is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hasattr(numpy, name)


class _Finder(MetaPathFinder):
    """Finds `mxnet` as the other finders do, and lets it load through `_Loader`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        for finder in sys.meta_path:
            if type(finder).__name__ != _Finder.__name__:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return _through_our_loader(spec)
        return None


def _through_our_loader(spec: ModuleSpec) -> ModuleSpec:
    # A namespace package, such as a folder called mxnet, has no loader.
    if spec.loader is not None:
        spec.loader = _Loader(spec.loader)
    return spec


class _Loader(Loader):
    """Adds the names to numpy, then loads MXNet with its own loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import numpy

        add_missing_names(numpy)
        _take_share_of_cores()
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            # MXNet uses modules that Python and scipy have deprecated.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._loader.exec_module(module)
        except (AttributeError, ImportError, RuntimeError) as error:
            raise _explained(error, numpy.__version__) from error


def _take_share_of_cores() -> None:
    """Set OMP_NUM_THREADS, which MXNet reads while it is imported.

    A Python that has no allstep, which the variable PYTHONPATH may reach too, is left as it is.
    """
    try:
        from allstep.framework_threads import take_openmp
    except ImportError:
        return
    take_openmp()


def _explained(error: Exception, version: str) -> Exception:
    """Return an error that names what is missing and a remedy; others as they are."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("distutils", "requests"):
        package = {"distutils": "setuptools"}.get(error.name, error.name)
        return ImportError(
            f"mxnet imports {error.name}, which is not installed: pip install {package}"
        )
    match = _MISSING_NAME.search(str(error))
    if match is None:
        return error
    name = next(filter(None, match.groups()))
    return ImportError(
        f"mxnet uses numpy.{name}, which numpy {version} does not have and for which allstep has"
        f" no replacement: pip install numpy=={KNOWN_TO_WORK}, in an environment with Python 3.11"
    )


# The replacements, as functions of numpy: it is not imported before MXNet is.


def _constant(value: float) -> Callable[[Any], Any]:
    return lambda numpy: value


def _same_as(name: str) -> Callable[[Any], Any]:
    """Return numpy's new name for the same function or type."""
    return lambda numpy: getattr(numpy, name)


def _builtin(kind: type) -> Callable[[Any], Any]:
    return lambda numpy: kind


def _sorted_rows(numpy: Any) -> Any:
    def msort(a: Any) -> Any:
        """Return a sorted copy along the first axis."""
        return numpy.sort(a, axis=0)

    return msort


def _financial(name: str) -> Callable[[Any], Any]:
    """Return a function that raises: numpy moved these to another package in 1.20."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"numpy.{name} was removed in numpy 1.20: use numpy_financial.{name}"
        )

    return lambda numpy: replacement


_INF, _NAN = float("inf"), float("nan")
_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "PZERO": _constant(0.0),
    "NZERO": _constant(-0.0),
    "PINF": _constant(_INF),
    "NINF": _constant(-_INF),
    "Inf": _constant(_INF),
    "Infinity": _constant(_INF),
    "infty": _constant(_INF),
    "NAN": _constant(_NAN),
    "NaN": _constant(_NAN),
    "bool": _builtin(bool),
    "float": _builtin(float),
    "int": _builtin(int),
    "object": _builtin(object),
    "float_": _same_as("float64"),
    "alltrue": _same_as("all"),
    "sometrue": _same_as("any"),
    "product": _same_as("prod"),
    "cumproduct": _same_as("cumprod"),
    "round_": _same_as("round"),
    "in1d": _same_as("isin"),
    "trapz": _same_as("trapezoid"),
    "msort": _sorted_rows,
    # MXNet's pad() asks whether its mode is a string.
    "compat": lambda numpy: SimpleNamespace(basestring=str),
    **{name: _financial(name) for name in ("mirr", "npv", "pmt", "ppmt", "pv", "rate")},
}
