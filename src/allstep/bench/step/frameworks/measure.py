"""How much of a worker's speed is left when workers of Keras, TensorFlow or MXNet train together?

| contender | what it is |
|---|---|
| independent copies | every rank trains its own plain model without communication: 100% |
| DistributedOptimizer, DistributedGradientTape, DistributedTrainer | the front-end of allstep |
| bridge alone | the same on a process set of one rank: nothing is reduced |
| a peer | the framework's own way, if it has one that runs on CPUs |

Independent copies, ours and the bridge take turns in the same processes; see `step.measure`, whose
rounds are used. A peer owns its process, so it has processes of its own, which sleep while the
others are measured. All are started by `allstep run`, hence with the same share of the cores.

Losses have to agree in the first steps, except those of peers in models with batch norms, of which
a peer may take the mean over all ranks.
"""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from allstep import machine
from allstep.bench.comm.measure import CommFailed, Team, start_team
from allstep.bench.launch import free_port
from allstep.bench.result import Missing
from allstep.bench.step.frameworks.result import FrameworkResult
from allstep.bench.step.frameworks.tasks import BRIDGE, framework_of, task_of
from allstep.bench.step.measure import StepRounds, run_rounds
from allstep.bench.step.result import ALONE
from allstep.console import quantities
from allstep.errors import ConfigError
from allstep.process.python import run_module

_RANK = "allstep.bench.step.frameworks.rank"
_PEER_RANK = "allstep.bench.step.frameworks.peer_rank"
_PEER = "peer"
# Compiling a ResNet takes minutes on a busy machine.
_SECONDS_TO_ANSWER = 600.0
# Memory of a rank in copies of the weights: four models with momentum, gradients and buffers.
_COPIES = 14

Progress = Callable[[str], None]


class Teams:
    """Ranks of several launchers; a request goes to those that have the contender."""

    def __init__(self, teams: Sequence[Team]) -> None:
        self._of = {name: team for team in teams for name in team.names}
        self.names = list(self._of)

    def request(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request to the ranks of the contender that it names; return their answers.

        A peer whose ranks end or exceed the timeout has failed; others are still measured.
        """
        team = self._of[next(iter(order.values()))]
        try:
            return team.request(order)
        except CommFailed as error:
            if team.name != _PEER:
                raise
            return [{"failed": str(error).splitlines()[0]}]


def measure_framework_step(
    framework: str,
    model: str = "cnn",
    num_ranks: int = 2,
    repetitions: int = 9,
    batch: int | None = None,
    progress: Progress = lambda text: None,
) -> FrameworkResult:
    """Time every contender `repetitions` times; the arguments are those of `measure_step`."""
    task = task_of(framework, model)
    batch = batch or task.batch
    _check_memory(model, num_ranks, task.num_parameters)
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="allstep-bench-")))
        progress("starting")
        missing: list[Missing] = []
        arguments = framework, model, str(batch)
        teams = Teams(_start(arguments, num_ranks, folder, ending, missing))
        peer = {framework_of(framework).peer: 0} if task.has_norms else {}
        apart = {ALONE: 1, BRIDGE: 1, **peer}
        rounds = StepRounds(teams, num_ranks, apart=apart, exact=False)
        run_rounds(rounds, repetitions, progress)
    absent = [*missing, *rounds.absent()]
    return FrameworkResult(model, num_ranks, batch, rounds.steps, rounds.rows(), absent, framework)


def _start(
    arguments: tuple[str, str, str],
    num_ranks: int,
    folder: Path,
    ending: contextlib.ExitStack,
    missing: list[Missing],
) -> list[Team]:
    """Start our ranks and those of the peer; a peer that fails is added to `missing`."""
    run = run_module("allstep", "run", "-np", str(num_ranks))
    ours = [*run, *run_module(_RANK, *arguments)]
    teams = [start_team("allstep run", ours, num_ranks, folder, ending, _SECONDS_TO_ANSWER)]
    if peer := framework_of(arguments[0]).peer:
        ports = ",".join(str(free_port()) for _ in range(num_ranks))
        command = [*run, *run_module(_PEER_RANK, *arguments, ports)]
        try:
            teams.append(start_team(_PEER, command, num_ranks, folder, ending, _SECONDS_TO_ANSWER))
        except CommFailed as error:
            missing.append(Missing(peer, f"it fails here: {str(error).splitlines()[-1]}"))
    return teams


def _check_memory(model: str, num_ranks: int, num_parameters: int) -> None:
    needed = _COPIES * num_ranks * 4 * num_parameters
    free = machine.memory().available
    if needed > free:
        raise ConfigError(
            f"--model {model} --np {num_ranks} needs about {quantities.nbytes(needed)} of memory,"
            f" {quantities.nbytes(free)} are free: choose a smaller model or fewer ranks"
        )
