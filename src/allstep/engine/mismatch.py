"""Compares the ranks' requests for one operation before it runs.

All ranks of an operation must agree on its kind, data type, shape, scale factors, reduction, root
and device. `judge` compares their requests field by field and returns a `Verdict`: the operation,
with the data of other ranks that each rank needs (the rows of each rank for allgather, the splits
of each rank for alltoall), or the text of the error that every rank raises. The order of the
comparisons and the texts are Horovod's.

This module is pure: no clock, no network, no tensors. Only `coordinator` calls `judge`; `executor`
reads the splits with `rows_of`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from allstep.engine.request import Kind, RequestSpec, numbers

# The operations to which a rank that has joined contributes zeros.
_WITH_JOIN = (Kind.ALLREDUCE, Kind.ADASUM)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing the requests: the operation, or the reason for refusing it.

    `more`: data of all ranks as text: the rows of each rank (allgather), or the splits of each rank
    (alltoall). `nbytes`: size of the operation, for fusion. `refusal`: the reason; empty if the
    operation can run.
    """

    spec: RequestSpec
    more: bytes = b""
    nbytes: int = 0
    refusal: str = ""


def judge(ranks: Sequence[int], specs: Sequence[RequestSpec], joined: Sequence[int]) -> Verdict:
    """Compare the requests of several ranks; the first difference decides.

    `ranks`: the ranks that made the requests, in the order of `specs`. `joined`: members that have
    joined.
    """
    first = specs[0]
    differ = any(spec is not first for spec in specs)
    why = (_difference(_LOOKS, ranks, specs) if differ else "") or _impossible(first, joined)
    why = why or (_difference(_LAST_LOOKS, ranks, specs) if differ else "")
    if why:
        return Verdict(first, refusal=why)
    nbytes, more = first.nbytes, b""
    if first.kind is Kind.ALLGATHER:
        nbytes = sum(spec.nbytes for spec in specs)
        more = joined_text(spec.shape[0] for spec in specs)
    elif first.kind is Kind.ALLTOALL:
        more = b";".join(
            joined_text(spec.splits or _even(spec.shape[0], len(specs))) for spec in specs
        )
    return Verdict(first, more, nbytes)


def joined_text(values: Iterable[int]) -> bytes:
    """Return integers as the text that `request.numbers` reads."""
    return ",".join(map(str, values)).encode()


def rows_of(more: bytes) -> list[tuple[int, ...]]:
    """Return the splits of each rank from the `more` of an alltoall."""
    return [numbers(text) for text in more.decode().split(";")]


def _even(num_rows: int, size: int) -> list[int]:
    return [num_rows // size] * size


# Returns title, compared value and verb; None if the kind has no such value.
_Look = Callable[[RequestSpec], tuple[str, str, str] | None]


def _difference(looks: Sequence[_Look], ranks: Sequence[int], specs: Sequence[RequestSpec]) -> str:
    """Describe the first value that differs between requests; "" if all are equal."""
    for look in looks:
        first = None
        for rank, spec in zip(ranks, specs, strict=True):
            found = look(spec)
            if found is None:
                continue
            if first is None:
                first = rank, found[1]
            elif found[1] != first[1]:
                title, _, verb = found
                return (
                    f"{title}: rank {first[0]} {verb} {first[1]}, but rank {rank} {verb}"
                    f" {found[1]}."
                )
    return ""


def _dtype(spec: RequestSpec) -> tuple[str, str, str]:
    return "Mismatched data types", spec.dtype, "had type"


def _kind(spec: RequestSpec) -> tuple[str, str, str]:
    return "Mismatched operations", spec.kind.name.lower(), "did an"


_ROWS_MAY_DIFFER = (Kind.ALLGATHER, Kind.ALLTOALL)


def _shape(spec: RequestSpec) -> tuple[str, str, str] | None:
    if spec.kind in _ROWS_MAY_DIFFER:
        return None
    if spec.kind in (Kind.ADD_SET, Kind.REMOVE_SET):
        return "Mismatched process sets", str(list(spec.splits)), "gave"
    return (
        f"Mismatched {spec.kind.name} tensor shapes",
        str(list(spec.shape)),
        "sent a tensor of shape",
    )


def _num_dims(spec: RequestSpec) -> tuple[str, str, str] | None:
    if spec.kind not in _ROWS_MAY_DIFFER:
        return None
    return (
        f"Mismatched {spec.kind.name} tensor shapes",
        str(len(spec.shape)),
        "sent a tensor of rank",
    )


def _later_dims(spec: RequestSpec) -> tuple[str, str, str] | None:
    if spec.kind not in _ROWS_MAY_DIFFER:
        return None
    sizes = ", ".join(
        f"dimension {index} equal to {size}" for index, size in enumerate(spec.shape) if index
    )
    return f"Mismatched {spec.kind.name} tensor shapes", sizes, "sent a tensor with"


def _factors(spec: RequestSpec) -> tuple[str, str, str] | None:
    if spec.kind not in (Kind.ALLREDUCE, Kind.ADASUM, Kind.REDUCESCATTER):
        return None
    return (
        "Mismatched prescale and/or postscale factors",
        f"{spec.prescale} and {spec.postscale}",
        "specified",
    )


def _op(spec: RequestSpec) -> tuple[str, str, str] | None:
    if spec.kind not in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        return None
    return "Mismatched reduction operations", spec.op.name, "specified reduction operation"


def _root(spec: RequestSpec) -> tuple[str, str, str] | None:
    if spec.kind is not Kind.BROADCAST:
        return None
    return "Mismatched broadcast root ranks", str(spec.root), "specified root rank"


def _device(spec: RequestSpec) -> tuple[str, str, str]:
    return "Mismatched CPU/GPU device selection", spec.device, "specified device"


# Horovod's order: with several differences, its users see the message that they know.
_LOOKS: tuple[_Look, ...] = (_dtype, _kind, _shape, _num_dims, _later_dims, _factors, _op)
# Compared after `_impossible`.
_LAST_LOOKS: tuple[_Look, ...] = (_root, _device)


def _impossible(spec: RequestSpec, joined: Sequence[int]) -> str:
    """Return the reason why an operation that all ranks agree on cannot run, or ""."""
    name = spec.kind.name.lower()
    if joined and spec.kind not in _WITH_JOIN:
        return f"{name} is not supported with Join: {_ranks(joined)} joined and has no data."
    if not spec.shape and spec.kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER):
        return (
            f"{name} of a tensor of rank zero: {spec.name} has no rows; expected"
            " at least one dimension."
        )
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return (
        f"rank {ranks[0]}" if len(ranks) == 1 else f"each of the ranks {', '.join(map(str, ranks))}"
    )
