"""The exception tree: every error that allstep raises on purpose.

```
RuntimeError
  AllstepError
    UserError            the user's to mend: one line on the terminal, exit status 2, no traceback
      ConfigError          a wrong option, key or value
      DataError            a file that is missing, truncated or not what it should be
      WorldError           ranks, sizes, hosts or launchers that contradict each other
      CheckpointError      a checkpoint that cannot be used
    CommError            something went wrong between ranks; carries rank, op, tensor, peer, seconds
      PeerLost             another rank's process or host is gone
      CollectiveMismatch   ranks called different collectives, shapes or dtypes
      CollectiveTimeout    a rank did not come in time
```

A message says what was wrong, with the numbers, and what to do next. `did_you_mean` gives the last
part of it for a name with a typo.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class AllstepError(RuntimeError):
    """Root of all errors that allstep raises on purpose."""

    exit_code = 1


class UserError(AllstepError):
    """Wrong use or bad input. Shown as one line; the process ends with status 2."""

    exit_code = 2


class ConfigError(UserError):
    """An option, key or value that cannot be right."""


class DataError(UserError):
    """Data that is missing, truncated or not what it should be."""


class WorldError(UserError):
    """Ranks, sizes, hosts or launchers that contradict each other."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used."""


class CommError(AllstepError):
    """Something went wrong between ranks.

    The figures a program may want are attributes; those not known are None.
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
    """Another rank's process or host is gone."""


class CollectiveMismatch(CommError):
    """Ranks called different collectives, or the same with different shapes or dtypes."""


class CollectiveTimeout(CommError):
    """A rank did not come in time."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, or all of them when none
    is near."""
    names = sorted(known)
    near = get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known are: {', '.join(names)}" if names else "none is known"


def cut(text: str, most: int = 200) -> str:
    """Return at most `most` characters of a text that an error quotes; "..." stands for the rest.

    A config is up to 1 MB long, and so may be each value in it.
    """
    return text if len(text) <= most else f"{text[:most]}..."
