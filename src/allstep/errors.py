"""The exception tree: every error that allstep raises on purpose.

```
RuntimeError
  AllstepError
    UserError            for the user to fix: one line on the terminal, exit status 2, no traceback
      ConfigError          a wrong option, key or value
      DataError            a file that is missing, truncated or malformed
      WorldError           ranks, sizes, hosts or launchers that contradict each other
      CheckpointError      a checkpoint that cannot be used
    CommError            a failure between ranks; has rank, op, tensor, peer and seconds
      PeerLost             another rank's process or host is lost
      CollectiveMismatch   ranks called different collectives, shapes or dtypes
      CollectiveTimeout    a rank did not enter a collective in time
```

A message states what is wrong, found against expected, and the next step. `did_you_mean` returns
the next step for a misspelled name.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class AllstepError(RuntimeError):
    """Root of all errors that allstep raises on purpose."""

    exit_code = 1


class UserError(AllstepError):
    """Wrong use or bad input, printed as one line; the process exits with status 2."""

    exit_code = 2


class ConfigError(UserError):
    """An option, key or value is wrong."""


class DataError(UserError):
    """Data is missing, truncated or malformed."""


class WorldError(UserError):
    """Ranks, sizes, hosts or launchers contradict each other."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used."""


class CommError(AllstepError):
    """A failure between ranks. Attributes that are not known are None.

    rank: the rank that raises. op: the operation. tensor: its name. peer: the rank that is lost or
    late. seconds: time waited.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        op: str | None = None,
        tensor: str | None = None,
        peer: int | None = None,
        seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.seconds = seconds


class PeerLost(CommError):
    """Another rank's process or host is lost."""


class CollectiveMismatch(CommError):
    """Ranks called different collectives, or the same with different shapes or dtypes."""


class CollectiveTimeout(CommError):
    """A rank did not enter a collective in time."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest known one, else all of them."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known are: {', '.join(names)}" if names else "none is known"


def cut(text: str, max_length: int = 200) -> str:
    """Return the first `max_length` characters of a text for an error; "..." replaces the rest.

    A config may have 1 MB, and so may each value in it.
    """
    return text if len(text) <= max_length else f"{text[:max_length]}..."
