"""Before the first reduction: all ranks agree on the same parameters, in the same order.

Each rank writes a list of its parameters (name, shape, strides, dtype, kind of device) to the
group's store and reads those of all others. The order is rank 0's. A parameter that is missing or
different on some rank is an error on all ranks, which names the parameter.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.nn import Parameter

from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.join.launcher_store import collect
from allstep.errors import CollectiveMismatch, CommError
from allstep.limits import read_limits


class Named(NamedTuple):
    """A parameter under the name that it has on all ranks."""

    name: str
    parameter: Parameter


def agreed_order(group: AllstepGroup, key: str, named: Sequence[Named]) -> list[Named]:
    """Return the parameters in the order of the first rank.

    Raise CollectiveMismatch on all ranks if they are not the same.
    """
    rank, size, seconds = group.rank(), group.size(), read_limits().start
    own = json.dumps([_described(each) for each in named])
    try:
        check = group.guard.check_for(f"agreement on {len(named)} parameters")
        store = group.get_group_store()
        texts = collect(store, f"gradients/{key}", rank, size, own, seconds, check)
    # A lost rank.
    except CommError:
        raise
    except RuntimeError as error:
        raise CommError(
            f"not all of {size} ranks joined to agree on {len(named)} parameters within"
            f" {seconds:.0f} s: make the same optimizers on all ranks, and change their parameters"
            f" together ({error})",
            rank=rank,
            op="gradients",
        ) from error
    described = [{name: rest for name, *rest in json.loads(text)} for text in texts]
    for other, theirs in enumerate(described):
        _check_same(described[0], theirs, other, rank)
    by_name = {each.name: each for each in named}
    return [by_name[name] for name in described[0]]


def _check_same(first: dict[str, Any], theirs: dict[str, Any], other: int, rank: int) -> None:
    for name in {**first, **theirs}:
        if first.get(name) != theirs.get(name):
            raise CollectiveMismatch(
                f"parameter {name!r} is {_as_text(first.get(name))} on rank 0 and"
                f" {_as_text(theirs.get(name))} on rank {other}",
                rank=rank,
                op="gradients",
                tensor=name,
                peer=other,
            )


def _described(each: Named) -> list[Any]:
    parameter = each.parameter
    return [
        each.name,
        list(parameter.shape),
        list(parameter.stride()),
        str(parameter.dtype),
        parameter.device.type,
    ]


def _as_text(described: list[Any] | None) -> str:
    """Return a parameter's description as text, for an error."""
    if described is None:
        return "missing"
    shape, stride, dtype, device = described
    return f"{dtype.removeprefix('torch.')} {shape} with strides {stride} on {device}"
