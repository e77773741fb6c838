"""The actions that the roster returns, for the launcher to carry out, and the plan of a world."""

from dataclasses import dataclass

from allstep.launch.cause import Failure
from allstep.launch.run_events import Conclusion


@dataclass(frozen=True)
class Plan:
    """The world of one generation.

    members: workers by rank, those of one host next to each other. source: the member whose state
    the others take; None in generation 0. updates: how many updates that state contains. new: the
    members that were not in the previous plan. behind: the members that were, but whose state is
    not whole or has another number of updates than that of the source. A world must synchronize its
    state if `new` or `behind` has a worker. reason: why the previous generation is over.
    """

    generation: int
    members: tuple[int, ...]
    source: int | None
    reason: str
    new: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    updates: int = 0


@dataclass(frozen=True)
class StartWorker:
    """Start a worker in a slot of a host; answered by `Standby`, `StartFailed` or an exit."""

    worker: int
    host: str
    slot: int


@dataclass(frozen=True)
class KillWorker:
    """Send SIGKILL to a worker; answered by its exit."""

    worker: int


@dataclass(frozen=True)
class Publish:
    """Publish a plan. Its members form the world of the plan's generation."""

    plan: Plan


@dataclass(frozen=True)
class EndGeneration:
    """End a generation: its members leave it at once, wherever they wait."""

    generation: int
    reason: str


@dataclass(frozen=True)
class NotifyChange:
    """Ask the members of a generation to leave it at their next step boundary or commit.

    kind: "grow" (workers join), "shrink" (hosts were withdrawn, or workers were lost that are not
    replaced) or "mixed".
    """

    generation: int
    kind: str


@dataclass(frozen=True)
class ReportLoss:
    """Print that the run continues without lost workers."""

    text: str


@dataclass(frozen=True)
class Dismiss:
    """Inform a worker that waits for a plan that it is not in the world any more: it exits."""

    worker: int


@dataclass(frozen=True)
class SaveAndExit:
    """Ask a worker that waits for a plan to exit with 75, because no plan will follow.

    saves: it writes a checkpoint first. Only one worker does.
    """

    worker: int
    saves: bool


@dataclass(frozen=True)
class ForwardSignal:
    """Send a signal to all workers."""

    number: int


@dataclass(frozen=True)
class FinishRun:
    """End the run. failures: those of the report, for a launcher that has printed some of them."""

    conclusion: Conclusion
    failures: tuple[Failure, ...] = ()


Action = (
    StartWorker
    | KillWorker
    | Publish
    | EndGeneration
    | NotifyChange
    | ReportLoss
    | Dismiss
    | SaveAndExit
    | ForwardSignal
    | FinishRun
)
