"""The kind of rounds of a run, by the `sync` of its config."""

from collections.abc import Callable, Mapping

from allstep.train.run.rounds.each_step import EachStep
from allstep.train.run.rounds.local_steps import LocalFromEpoch, LocalSteps
from allstep.train.run.rounds.pushes import Pushes
from allstep.train.run.rounds.round import Round, Surroundings

_ROUNDS: Mapping[str, Callable[[Surroundings], Round]] = {
    "allreduce": EachStep,
    "server": EachStep,
    "local": LocalFromEpoch,
    "diloco": LocalSteps,
    "async": Pushes,
    "stale": Pushes,
    "clock": Pushes,
    "lazy": Pushes,
    "elastic": Pushes,
}


def make_round(around: Surroundings) -> Round:
    """Return the rounds of a run in the world in which its job has been placed. A collective."""
    return _ROUNDS[around.job.config.sync.mode.name](around)
