"""The messages between launcher and agents, and their encoding as lines of JSON.

A message is a frozen dataclass. It is sent as one line::

    {"kind": "exit", "version": "0.1.0", "rank": 3, "code": 1, "out_of_memory": false}

`decode` checks a received line in this order: the version of allstep that wrote it, the kind, the
type of every field. A failed check raises `BadMessage` with kind, field and both versions. Unknown
fields are ignored. `Lines` carries no version: it is most of the traffic, and the hello has already
compared versions.

A `rank` in these messages is the number of the worker: its rank in a fixed world, in an elastic run
a number that it keeps while its rank changes.

===========  =====================================================================================
to agent     `Start`, `Signal`, `Kill`, `KillOne`, `Finish`, `Alive`
from agent   `Hello`, `Started`, `Lines`, `Exit`, `Received`, `Problem`, `Alive`
===========  =====================================================================================
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Union

from allstep._version import __version__
from allstep.errors import WorldError, cut

START = b'{"kind":'
"""Start of the line of a message."""


class BadMessage(WorldError):
    """A message that the receiver cannot use.

    what: what the sender did, as a phrase that follows its name: "sent ...". kind, field: the kind
    and field of the message, "" if unknown. theirs, ours: the versions of allstep of sender and
    receiver.
    """

    def __init__(self, what: str, kind: str = "", field: str = "", theirs: str = "") -> None:
        self.what, self.kind, self.field = what, kind, field
        self.theirs, self.ours = theirs or "of an unknown version", __version__
        super().__init__(self.described("the other side"))

    def described(self, sender: str) -> str:
        """Return the error in one line that names the sender."""
        versions = f"has allstep {self.theirs}, here is {self.ours}: install the same on every host"
        return f"{sender} {self.what}; it {versions}" if self.what else f"{sender} {versions}"


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages. `kind` is the name of the type in the encoded line."""

    kind: ClassVar[str]


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first message of an agent.

    port: reserved for MASTER_PORT. interfaces: addresses of the host by interface.
    launcher_address: the address from which ssh connected. address: the address of this host to
    which ssh connected.
    """

    kind: ClassVar[str] = "hello"
    port: int
    interfaces: dict[str, list[str]]
    launcher_address: str | None
    address: str | None


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """One worker to start: its rank, and the environment variables of this rank only."""

    rank: int
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Start(Message):
    """Start workers of the host: all at once, or in an elastic run one.

    env: of all workers of the host. servers: names of parameter servers to start before them.
    num_sharing: workers that will share its cores. is_elastic: the
    world changes during the run. Processes that a worker leaves behind are then killed when it
    ends, else at the end of the run; and workers choose the network interface themselves in each
    world. foreground: the rank that inherits the agent's standard output.
    store: addresses of the launcher's store, in the order to try. peers: addresses of the other
    hosts. iface: the interface that the user set, or None. lost, beat: seconds (`allstep.limits`).
    """

    kind: ClassVar[str] = "start"
    command: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    workers: tuple[WorkerOrder, ...]
    foreground: int | None
    store: tuple[tuple[str, int], ...]
    token: str
    peers: tuple[str, ...]
    iface: str | None
    lost: float
    beat: float
    num_sharing: int
    is_elastic: bool
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Signal(Message):
    """Send this signal to the process groups of all running workers, unless they have it already.

    confirms: workers of an elastic run wait for a confirmation (`process.deferred_signals`).
    """

    kind: ClassVar[str] = "signal"
    number: int
    confirms: bool


@dataclass(frozen=True, slots=True)
class Kill(Message):
    """Send SIGKILL to the process groups of all running workers."""

    kind: ClassVar[str] = "kill"


@dataclass(frozen=True, slots=True)
class KillOne(Message):
    """Send SIGKILL to the process group of one worker."""

    kind: ClassVar[str] = "kill-one"
    rank: int


@dataclass(frozen=True, slots=True)
class Finish(Message):
    """Kill all remaining processes and exit."""

    kind: ClassVar[str] = "finish"


@dataclass(frozen=True, slots=True)
class Alive(Message):
    """A sign of life, from either side."""

    kind: ClassVar[str] = "alive"


@dataclass(frozen=True, slots=True)
class Started(Message):
    """A worker has been started."""

    kind: ClassVar[str] = "started"
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Lines(Message):
    """Output of a worker on one of its two streams, in chunks as `output.lines` cuts them."""

    kind: ClassVar[str] = "lines"
    rank: int
    stream: Literal["out", "err"]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exit(Message):
    """A worker has ended.

    code: as in subprocess, negative for a signal. out_of_memory: the kernel has killed processes of
    this host for lack of memory.
    """

    kind: ClassVar[str] = "exit"
    rank: int
    code: int
    out_of_memory: bool


@dataclass(frozen=True, slots=True)
class Received(Message):
    """The agent has received a signal, as Slurm sends it to the processes of a job step."""

    kind: ClassVar[str] = "received"
    number: int


@dataclass(frozen=True, slots=True)
class Problem(Message):
    """The host cannot start its workers; `text` is the reason, in one line."""

    kind: ClassVar[str] = "problem"
    text: str


@dataclass(frozen=True)
class Channel:
    """The messages that one end of a link accepts, by kind, and whether versions must be equal."""

    kinds: Mapping[str, type[Message]]
    same_version: bool = True


def channel(*kinds: type[Message], same_version: bool = True) -> Channel:
    """Return the channel that accepts these types of message."""
    return Channel({each.kind: each for each in kinds}, same_version)


TO_AGENT = channel(Start, Signal, Kill, KillOne, Finish, Alive)
TO_LAUNCHER = channel(Lines, Hello, Started, Exit, Received, Problem, Alive)


def encode(message: Message) -> bytes:
    """Return the message as a line, without the newline."""
    if isinstance(message, Lines):
        fields: dict[str, Any] = {
            "kind": "lines",
            "rank": message.rank,
            "stream": message.stream,
            "lines": message.lines,
        }
    else:
        fields = {"kind": message.kind, "version": __version__, **dataclasses.asdict(message)}
    return json.dumps(fields).encode()


def decode(line: bytes, expected: Channel) -> Message:
    """Return the message in a line; BadMessage if the channel `expected` does not accept it."""
    try:
        found = json.loads(line)
    # RecursionError: thousands of opening brackets.
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"sent a message that is not JSON: {cut(ascii(line), 80)}") from error
    kind = found.get("kind") if isinstance(found, dict) else None
    if not isinstance(kind, str):
        raise BadMessage(f"sent a message without a kind: {cut(ascii(line), 80)}", field="kind")
    theirs = _version(found)
    if kind != "lines" and theirs != __version__ and expected.same_version:
        raise BadMessage("", kind, "version", theirs)
    if kind not in expected.kinds:
        raise BadMessage(
            f"sent message {cut(ascii(kind), 40)}, which is unknown here", kind, "kind", theirs
        )
    message: Message = _read(expected.kinds[kind], found, kind, theirs)
    return message


def _version(found: Mapping[str, Any]) -> str:
    version = found.get("version")
    return cut(version, 40) if isinstance(version, str) else ""


def _read(cls: type, found: Mapping[str, Any], kind: str, theirs: str) -> Any:
    """Return an object of the dataclass `cls` with the fields in `found`."""
    values = []
    for name, read in _fields(cls):
        if name not in found:
            raise BadMessage(f"sent message {kind!r} without field {name!r}", kind, name, theirs)
        try:
            values.append(read(found[name]))
        except _WrongType as wrong:
            what = (
                f"sent message {kind!r} with field {name!r}: found {wrong.found}, expected"
                f" {wrong.expected}"
            )
            raise BadMessage(what, kind, name, theirs) from None
    return cls(*values)


class _WrongType(Exception):
    """A value does not fit the type of its field."""

    def __init__(self, value: object, expected: str) -> None:
        self.found, self.expected = cut(ascii(value), 60), expected


Reader = Callable[[Any], Any]


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, Reader], ...]:
    """Return the names of the fields, each with a function that checks and converts its value."""
    hints = typing.get_type_hints(cls)
    return tuple((field.name, _reader(hints[field.name])) for field in dataclasses.fields(cls))


def _reader(hint: Any) -> Reader:
    """Return the function that checks values of a type.

    Supported: plain types, optional ones, Literal, list, tuple, dict with str keys, dataclass.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if dataclasses.is_dataclass(hint):
        return functools.partial(_nested, typing.cast(type, hint))
    if origin is tuple:
        return (
            _sequence(_reader(inner[0]))
            if inner[1:] == (...,)
            else _row([_reader(each) for each in inner])
        )
    if origin is list:
        return _listed(_reader(inner[0]))
    if origin is dict:
        return _mapping(_reader(inner[1]))
    if origin is Literal:
        return _one_of(inner)
    if origin in (types.UnionType, Union):
        return _optional(next(_reader(each) for each in inner if each is not type(None)))
    return _plain(hint)


def _plain(cls: type) -> Reader:
    def read(value: Any) -> Any:
        # Not isinstance: True is an int.
        if type(value) is cls:
            return value
        if cls is float and type(value) is int:
            return float(value)
        raise _WrongType(value, cls.__name__)

    return read


def _one_of(allowed: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is str and value in allowed:
            return value
        raise _WrongType(value, " or ".join(map(repr, allowed)))

    return read


def _optional(read_one: Reader) -> Reader:
    return lambda value: None if value is None else read_one(value)


def _sequence(read_one: Reader) -> Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _WrongType(value, "a list")
        return tuple(map(read_one, value))

    return read


def _listed(read_one: Reader) -> Reader:
    read_all = _sequence(read_one)
    return lambda value: list(read_all(value))


def _row(readers: list[Reader]) -> Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(readers):
            raise _WrongType(value, f"a list of {len(readers)}")
        return tuple(read_one(each) for read_one, each in zip(readers, value, strict=True))

    return read


def _mapping(read_one: Reader) -> Reader:
    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _WrongType(value, "an object")
        return {name: read_one(each) for name, each in value.items()}

    return read


def _nested(cls: type, value: Any) -> Any:
    if type(value) is not dict:
        raise _WrongType(value, "an object")
    for name, _ in _fields(cls):
        if name not in value:
            raise _WrongType(value, f"an object with {name!r}")
    return cls(*(read(value[name]) for name, read in _fields(cls)))
