"""Which frameworks are installed, found without importing one.

Horovod compiles one extension for each framework and reports which ones exist. allstep has all its
front-ends in one wheel, so a front-end is available when its framework is installed.
"""

import importlib.util
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Framework:
    """A framework that has a front-end, or that a front-end can use."""

    name: str
    module: str
    packages: tuple[str, ...]
    """Names under which it is published, the usual one first."""
    install: str
    """Arguments of `pip install`."""

    @property
    def version(self) -> str | None:
        """The installed version; None: not installed."""
        for package in self.packages:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return "of unknown version" if is_importable(self.module) else None


TORCH = Framework("PyTorch", "torch", ("torch",), "torch")
TENSORFLOW = Framework(
    "TensorFlow",
    "tensorflow",
    ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly"),
    "tensorflow",
)
KERAS = Framework("Keras", "keras", ("keras", "keras-nightly"), "keras")
KERAS_2 = Framework("tf-keras", "tf_keras", ("tf-keras", "tf-keras-nightly"), "tf-keras")
JAX = Framework("JAX", "jax", ("jax",), "jax")
MXNET = Framework(
    "MXNet",
    "mxnet",
    ("mxnet", "mxnet-cu112", "mxnet-cu110", "mxnet-cu102", "mxnet-native"),
    "--no-deps mxnet==1.9.1 requests",
)
ALL = (TORCH, TENSORFLOW, KERAS, KERAS_2, JAX, MXNET)

KERAS_BACKENDS = ("torch", "tensorflow", "jax")
"""Backends of Keras 3 that can train."""

FRONT_ENDS = {"torch": TORCH, "tensorflow": TENSORFLOW, "keras": KERAS, "mxnet": MXNET}
"""Framework by the last part of Horovod's module name, such as `horovod.mxnet`."""


def is_importable(module: str) -> bool:
    """Return whether a top-level module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    # A module of that name is already loaded but has no spec, as one that a test has made.
    except ValueError:
        return True


def versions() -> dict[str, str | None]:
    """Return the installed version of every framework by its name; None: not installed."""
    return {framework.name: framework.version for framework in ALL}


def missing(module: str, error: ModuleNotFoundError) -> ImportError:
    """Return the error for a front-end whose framework could not be imported.

    `module`: the front-end. `error`: Python's, which names the module that it did not find.
    """
    for framework in ALL:
        if (error.name or "").partition(".")[0] == framework.module:
            return _not_installed(module, framework)
    return ImportError(f"{module}: {error}", name=error.name)


def no_backend(error: ValueError) -> Exception:
    """Return the error for a Keras that was not imported, because it does not know its backend.

    `error`: Keras's, or another ValueError of its import, which is returned as it is.
    """
    text, _, backend = str(error).partition(" : ")
    if text != "Unable to import backend":
        return error
    return ImportError(
        f'Keras has no backend {backend!r}: set KERAS_BACKEND (or "backend" in'
        f" ~/.keras/keras.json) to one of {', '.join(KERAS_BACKENDS)}",
        name="keras",
    )


def _not_installed(module: str, framework: Framework) -> ImportError:
    return ImportError(
        f"{module} needs {framework.name}, which is not installed: pip install {framework.install}",
        name=framework.module,
    )


def require(module: str, *frameworks: Framework) -> None:
    """Raise ImportError if `module` needs one of these frameworks and it is not installed."""
    for framework in frameworks:
        if not is_importable(framework.module):
            raise _not_installed(module, framework)
