"""Checks of the arguments of a distributed optimizer."""

import warnings
from typing import Any

from allstep.engine import Op
from allstep.hvd.requests import Average, Sum
from allstep.torch.compression import Compression

_COMPRESSORS = {"NoneCompressor": "none", "FP16Compressor": "fp16", "BF16Compressor": "bf16"}


def checked_op(op: int, predivide: float) -> int:
    """Return the reduction; raise ValueError if a Keras optimizer cannot use it."""
    if op not in (Average, Sum):
        raise ValueError(
            f"op={_op_name(op)} is not supported by a Keras optimizer: use hvd.Average or hvd.Sum"
        )
    if predivide != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor={predivide} needs op=hvd.Average")
    return op


def _op_name(op: Any) -> str:
    """Return a reduction as a script writes it; other values as they are."""
    return f"hvd.{Op(op).name.capitalize()}" if op in list(Op) else repr(op)


def checked_passes(passes: int) -> int:
    """Return the number of backward passes per step; raise ValueError below 1."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: it must be above 0")
    return passes


def check_groups(num_groups: int, groups: Any) -> None:
    """Raise ValueError if these are not groups of gradients."""
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None or (isinstance(groups, list) and all(isinstance(g, list) for g in groups)):
        return
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 0:
        raise ValueError(
            f"groups={groups!r}: expected a number of groups or a list of lists of variables"
        )


def compressor(compression: Any) -> dict[str, Any]:
    """Return the two functions of a compressor for torch tensors; None for no compression.

    Those of another front-end are known by their names, since gradients are torch tensors here.
    """
    known = compressor_name(compression)
    used = compression if known is None else getattr(Compression, known)
    is_used = used is not Compression.none
    return {
        "compress": used.compress if is_used else None,
        "decompress": used.decompress if is_used else None,
    }


def compressor_name(compression: Any) -> str | None:
    """Return the name that every front-end's `Compression` has for a compressor; None: a custom
    one."""
    return _COMPRESSORS.get(getattr(compression, "__name__", ""))


def checked_layers(local_layers: Any, layer_class: type) -> list[Any]:
    """Return a list of layers; raise ValueError for anything else.

    `layer_class`: the class of layers in the Keras that is used.
    """
    layers = [] if local_layers is None else local_layers
    layers = [layers] if isinstance(layers, layer_class) else list(layers)
    for layer in layers:
        if not isinstance(layer, layer_class):
            raise ValueError(
                f"local_layers: expected layers of the model, found {type(layer).__name__}"
            )
    return layers
