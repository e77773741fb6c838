"""Runs at the start of every Python process that has this folder on PYTHONPATH.

MXNet 1.9.1 reads names that numpy has removed. A script written for Horovod imports mxnet before
horovod, so the hook that adds these names has to exist before the script runs. Nothing of it is
loaded until a script imports mxnet.

Python runs only the first `sitecustomize` that it finds; this one then runs the next one on the
path, under its own name, as if this folder were not there. The syntax is that of old Pythons too:
the variable may also reach a Python that has no allstep.
"""

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(__file__)  # noqa: PTH120
_NUMPY_NAMES = os.path.join(os.path.dirname(_HERE), "mxnet", "numpy_names.py")  # noqa: PTH118, PTH120


class _BeforeMXNet:
    """A finder of modules that installs allstep's hook for MXNet when mxnet is first imported."""

    def __init__(self) -> None:
        self.is_installed = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return the hook's answer for mxnet, once; None for other modules."""
        if name != "mxnet" or self.is_installed:
            return None
        self.is_installed = True
        num_finders = len(sys.meta_path)
        _load("allstep_numpy_names", _NUMPY_NAMES).install()
        # `import allstep.mxnet` may have installed the hook, which then is the caller.
        is_new = len(sys.meta_path) > num_finders
        return sys.meta_path[0].find_spec(name, path, target) if is_new else None


def _load(name: str, file: str) -> "Any":
    """Run one file as a module."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_next() -> None:
    """Run the `sitecustomize` that comes after this folder on the path, if there is one."""
    later = sys.path[sys.path.index(_HERE) + 1 :] if _HERE in sys.path else []
    spec = PathFinder.find_spec("sitecustomize", later)
    # A folder of that name without a module in it has no loader.
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.path.exists(_NUMPY_NAMES):  # noqa: PTH110
    sys.meta_path.insert(0, _BeforeMXNet())
_run_next()
