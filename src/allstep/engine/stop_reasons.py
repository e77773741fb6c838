"""Why an engine ends, as an error here and as a message to the other ranks."""

from allstep.engine.messages import STOP, Fields
from allstep.engine.request import EngineStopped
from allstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost

_KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind
    for kind in (EngineStopped, PeerLost, CollectiveTimeout, CollectiveMismatch, CommError)
}


def as_comm_error(error: BaseException, rank: int) -> CommError:
    """What whoever waits is told of an error of any kind."""
    return (
        error
        if isinstance(error, CommError)
        else CommError(f"{type(error).__name__}: {error}", rank=rank)
    )


def stop_message(error: CommError) -> Fields:
    """An error, for the other ranks to end with."""
    kind = type(error).__name__ if type(error).__name__ in _KINDS else "CommError"
    return [
        STOP,
        kind.encode(),
        str(error).encode(),
        b"" if error.peer is None else b"%d" % error.peer,
    ]


def error_in(fields: Fields, rank: int) -> CommError:
    """The error that such a message tells this rank of."""
    kind, text, peer = fields[1].decode(), fields[2].decode(), fields[3]
    return _KINDS[kind](text, rank=rank, peer=int(peer) if peer else None)
