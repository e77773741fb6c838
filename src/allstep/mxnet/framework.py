"""MXNet itself, imported once, behind the hook for the numpy names that it needs."""

from typing import Any

from allstep.mxnet.numpy_names import install

NOT_INSTALLED = (
    "allstep.mxnet needs the package mxnet, which is not installed: pip install --no-deps"
    " mxnet==1.9.1 (with its dependencies it would replace numpy by a version before 2)"
)


def _import_mxnet() -> Any:
    install()
    try:
        import mxnet
    except ModuleNotFoundError as error:
        if error.name == "mxnet":
            raise ModuleNotFoundError(NOT_INSTALLED, name="mxnet") from error
        raise
    return mxnet


mx = _import_mxnet()
