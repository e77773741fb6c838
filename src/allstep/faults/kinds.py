"""The kinds of faults and the places where each can occur: one table.

A *place* is a part of WHERE in `KIND[:VALUE]@WHERE`. `rank` selects the process; `step`, `commit`,
`op`, `seconds` and `sample` are triggers, of which a fault has at most one; `during` is a phase.
"""

from dataclasses import dataclass

TRIGGERS = ("step", "commit", "op", "seconds", "sample")
STEP_PHASES = ("reduce", "update")
"""Values of `during` that are phases of a step."""
SINGLE_PHASES = ("forming", "broadcast")
"""Values of `during` that belong to no step."""
PHASES = STEP_PHASES + SINGLE_PHASES

_ANYWHERE = ("rank", *TRIGGERS, "during")


@dataclass(frozen=True)
class Value:
    """The value after the colon: its name, its range, and whether it is a whole number.

    usual: the value that `random:` uses when it is not given.
    """

    name: str
    low: float
    high: float
    whole: bool = False
    usual: float | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    does: what the victim does, for the report; `{}` is the value. places: parts of WHERE that it
    accepts. value: None if it has none. repeats: it occurs at each step (or commit) of a range;
    the others occur once. in_thread: with `seconds`, it occurs at that moment, in a thread; the
    others occur at the first step or collective after it. may_be_random: `random:` can choose it.
    """

    does: str
    places: tuple[str, ...] = _ANYWHERE
    value: Value | None = None
    repeats: bool = False
    in_thread: bool = False
    may_be_random: bool = True


KINDS = {
    "kill": Kind("kills itself with SIGKILL", in_thread=True),
    "exit": Kind(
        "exits with code {}", value=Value("CODE", 0, 255, whole=True, usual=1), in_thread=True
    ),
    "raise": Kind("raises InjectedFault"),
    "stop": Kind(
        "stops for {} s (SIGSTOP)", value=Value("SECONDS", 0.01, 86_400, usual=1), in_thread=True
    ),
    "hang": Kind("hangs"),
    "slow": Kind(
        "slows down by a factor of {}",
        places=("rank", "step"),
        value=Value("FACTOR", 1, 1000),
        repeats=True,
        may_be_random=False,
    ),
    "cut": Kind("closes the connections of its groups", in_thread=True),
    "disk-full": Kind(
        "finds the disk full", places=("rank", "commit"), repeats=True, may_be_random=False
    ),
    "corrupt": Kind("reads damaged bytes", places=("rank", "sample"), may_be_random=False),
    "nan": Kind("makes its loss NaN", places=("rank", "step", "sample"), repeats=True),
    "flip": Kind("flips one bit of its weights", places=("rank", "step", "seconds", "sample")),
    "kill-agent": Kind("kills its agent with SIGKILL", in_thread=True),
}
EFFECTS = ("nan", "flip")
"""Kinds that the owner of the tensors carries out, in a step."""

RANDOM = "random"
RANDOM_PLACES = ("every", "seed", "rank")
