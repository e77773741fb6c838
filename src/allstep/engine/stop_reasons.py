"""The reason for the end of an engine, as an error here and as a message to the other ranks."""

from allstep.engine.messages import STOP, Fields
from allstep.engine.request import EngineStopped
from allstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost

_KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind
    for kind in (EngineStopped, PeerLost, CollectiveTimeout, CollectiveMismatch, CommError)
}


def as_comm_error(error: BaseException, rank: int) -> CommError:
    """Return the error to raise in callers that wait: `error`, or a CommError that describes it."""
    return (
        error
        if isinstance(error, CommError)
        else CommError(f"{type(error).__name__}: {error}", rank=rank)
    )


def stop_message(error: CommError) -> Fields:
    """Return the stop message that raises `error` on the other ranks."""
    kind = type(error).__name__ if type(error).__name__ in _KINDS else "CommError"
    return [
        STOP,
        kind.encode(),
        str(error).encode(),
        b"" if error.peer is None else b"%d" % error.peer,
    ]


def error_in(fields: Fields, rank: int) -> CommError:
    """Return the error that a stop message describes."""
    kind, text, peer = fields[1].decode(), fields[2].decode(), fields[3]
    return _KINDS[kind](text, rank=rank, peer=int(peer) if peer else None)
