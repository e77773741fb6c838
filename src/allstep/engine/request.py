"""What a rank requests from the engine, and how it is sent to the coordinator.

A `Request` holds the tensors. A `RequestSpec` holds the facts that other ranks need: kind, dtype,
shape, factors, name. A spec is sent as one line of text. A repeated request has the same bytes, so
both sides look the bytes up in a cache and parse nothing. For the same reason, specs that were read
from equal bytes are one object and can be compared with `is`.

The full name of a request is `<prefix>.<name>` and is chosen by the caller; a request without one
is named after its handle, `<prefix>.noname.<handle>`. Requests of several ranks with equal process
set and name form one operation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from allstep.errors import CommError

# Process set and full name, by which the requests of several ranks are matched.
Key = tuple[int, str]


class Kind(IntEnum):
    """The kinds of requests. The engine itself makes the last two, to change the process sets."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    ADASUM = 5
    BARRIER = 6
    JOIN = 7
    ADD_SET = 8
    REMOVE_SET = 9


class Op(IntEnum):
    """The reductions, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class DuplicateName(ValueError):
    """An operation of this name is in progress on this rank."""


class EngineStopped(CommError):
    """The engine was shut down, by this or another rank."""


@dataclass(frozen=True, slots=True)
class Request:
    """One operation on this rank.

    `tensor`: the input; any layout. `output`: the tensor for the result (may be `tensor`); None for
    a new tensor. `prescale`, `postscale`: factors before and after the reduction. `root`: the
    sender of a broadcast, a rank of the world. `splits`: rows of `tensor` for each rank of the set.
    `process_set`: the number of the set. `device`: the GPU on which a rank that has joined
    allocates its zeros; -1 is the CPU.
    """

    kind: Kind
    name: str = ""
    tensor: Tensor | None = None
    output: Tensor | None = None
    op: Op = Op.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] | None = None
    process_set: int = 0
    device: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpec:
    """The facts about a request that other ranks need. `data` is the encoded spec, in bytes."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    op: Op
    prescale: float
    postscale: float
    root: int
    splits: tuple[int, ...]
    process_set: int
    device: str
    name: str
    nbytes: int
    data: bytes

    @property
    def key(self) -> Key:
        """Process set and full name."""
        return self.process_set, self.name


_LONGEST_NAME = 10_000
_PREFIX = {
    Kind.ALLREDUCE: "allreduce",
    Kind.ALLGATHER: "allgather",
    Kind.BROADCAST: "broadcast",
    Kind.ALLTOALL: "alltoall",
    Kind.REDUCESCATTER: "reducescatter",
    Kind.ADASUM: "allreduce",
}
_OWN_NAME = {
    Kind.BARRIER: "barrier.noname",
    Kind.JOIN: "join.noname",
    Kind.ADD_SET: "process_set.add",
    Kind.REMOVE_SET: "process_set.remove",
}
_MAX_SPECS = 10_000
_specs: dict[bytes, RequestSpec] = {}


def full_names(requests: Sequence[Request], handle: int) -> list[str]:
    """Return the names of requests that are submitted together."""
    if len(requests) == 1:
        (request,) = requests
        return [
            _OWN_NAME.get(request.kind)
            or request.name
            or f"{_PREFIX[request.kind]}.noname.{handle}"
        ]
    number = len(requests)
    return [
        request.name or f"grouped_{_PREFIX[request.kind]}.noname.{handle}_{index}of{number}"
        for index, request in enumerate(requests, 1)
    ]


def encode(request: Request, name: str) -> bytes:
    """Encode a request for other ranks.

    The name is the last field, so it may contain any character.
    """
    tensor = request.tensor
    if tensor is None:
        dtype, shape, device = "", "", "cpu"
    else:
        dtype, shape = str(tensor.dtype)[6:], ",".join(map(str, tensor.shape))
        device = tensor.device.type
    splits = ",".join(map(str, request.splits or ()))
    prescale, postscale = float(request.prescale), float(request.postscale)
    text = (
        f"{request.kind:d}\t{dtype}\t{shape}\t{request.op:d}\t{prescale!r}\t{postscale!r}\t"
        f"{request.root}\t{splits}\t{request.process_set}\t{device}\t{name}"
    )
    return text.encode()


def decode(data: bytes) -> RequestSpec:
    """Decode a spec; equal bytes give the same object."""
    spec = _specs.get(data)
    if spec is None:
        if len(_specs) >= _MAX_SPECS:
            _specs.clear()
        spec = _specs[data] = _parse(data)
    return spec


def _parse(data: bytes) -> RequestSpec:
    kind, dtype, shape, op, prescale, postscale, root, splits, process_set, device, name = (
        data.decode().split("\t", 10)
    )
    dims = numbers(shape)
    itemsize = getattr(torch, dtype).itemsize if dtype else 0
    return RequestSpec(
        Kind(int(kind)),
        dtype,
        dims,
        Op(int(op)),
        float(prescale),
        float(postscale),
        int(root),
        numbers(splits),
        int(process_set),
        device,
        name,
        itemsize * torch.Size(dims).numel(),
        data,
    )


def numbers(text: str) -> tuple[int, ...]:
    """Return `3,4` as (3, 4)."""
    return tuple(map(int, text.split(","))) if text else ()


def check(request: Request, rank: int, members: Sequence[int]) -> None:
    """Raise an error for a mistake of this rank's caller that does not concern other ranks."""
    tensor, kind = request.tensor, request.kind
    if kind in _PREFIX and (tensor is None or tensor.layout is not torch.strided):
        found = "no tensor" if tensor is None else f"a tensor of layout {tensor.layout}"
        raise ValueError(f"{kind.name.lower()} needs a dense tensor, found {found}")
    if len(request.name) > _LONGEST_NAME:
        raise ValueError(
            f"{kind.name.lower()}: a name of {len(request.name):,} characters, expected at most"
            f" {_LONGEST_NAME:,}"
        )
    if not request.name.isprintable() and any(
        "\ud800" <= character <= "\udfff" for character in request.name
    ):
        raise ValueError(
            f"{kind.name.lower()}: the name {request.name!r} is not text that can be sent (UTF-8)"
        )
    if kind is Kind.BROADCAST and request.root not in members:
        raise ValueError(
            f"broadcast: invalid root rank {request.root}: it must be one of {list(members)}"
        )
    if kind is Kind.REDUCESCATTER:
        _check_scatter(request)
    if kind is Kind.ALLTOALL:
        assert tensor is not None
        _check_splits(tensor, request.splits, len(members))
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER, Kind.ADASUM):
        assert tensor is not None
        _check_arithmetic(kind, request.op, tensor.dtype, len(members))
    if request.output is not None and any(
        step == 0 and length > 1
        for step, length in zip(request.output.stride(), request.output.shape, strict=True)
    ):
        raise ValueError(
            f"{kind.name.lower()}: the result cannot be written into a tensor whose elements share"
            " memory (expand): clone it first"
        )
    if request.output is not None and tensor is not None and request.output.shape != tensor.shape:
        raise ValueError(
            f"{kind.name.lower()}: the output has shape {list(request.output.shape)}, the input"
            f" {list(tensor.shape)}"
        )


def _check_scatter(request: Request) -> None:
    assert request.tensor is not None
    if request.tensor.dim() == 0:
        raise ValueError("reducescatter does not support scalar tensors: it distributes rows")
    if request.op not in (Op.AVERAGE, Op.SUM):
        raise CommError(
            f"reducescatter only supports AVERAGE and SUM, not {request.op.name}",
            op="reducescatter",
        )


def _check_splits(tensor: Tensor, splits: tuple[int, ...] | None, size: int) -> None:
    if tensor.dim() == 0:
        # All ranks refuse it together, see `mismatch`.
        return
    num_rows = tensor.shape[0]
    if not splits:
        if num_rows % size:
            raise ValueError(
                f"alltoall: {num_rows} rows cannot be divided evenly among {size} ranks: give"
                " splits"
            )
    elif len(splits) != size or min(splits) < 0 or sum(splits) > num_rows:
        raise ValueError(
            f"alltoall: splits {list(splits)} must be {size} numbers from 0 with a sum of at most"
            f" {num_rows}, the rows of the tensor"
        )


def _check_arithmetic(kind: Kind, op: Op, dtype: torch.dtype, size: int) -> None:
    """Raise ValueError for arithmetic that torch lacks; otherwise it would stop all engines."""
    if dtype.is_complex and op in (Op.MIN, Op.MAX):
        raise ValueError(
            f"{kind.name.lower()}: complex numbers have no order, so {op.name} is not supported"
        )
    if kind is Kind.ADASUM and size & (size - 1):
        raise ValueError(f"Adasum needs a number of ranks that is a power of two, not {size}")
    if kind is Kind.ADASUM and not dtype.is_floating_point:
        raise ValueError(f"Adasum of {dtype} is not supported: it needs floating-point numbers")
    if dtype.itemsize == 1 and dtype.is_floating_point:
        raise ValueError(
            f"{kind.name.lower()} of {dtype} is not supported: torch cannot add it; cast it first"
        )
