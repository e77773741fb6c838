"""What the commands of `allstep study` share: the config before the runs, and the runs.

```
begin    arguments of the command -> recipe, overrides of every run, config
run      a study without precision -> its folder, its runs, its findings on the terminal
```
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import typer

from allstep.console.escape import escaped, print_notice

if TYPE_CHECKING:
    from allstep.study import Study, StudyFolder
    from allstep.study.findings import Findings
    from allstep.study.trial import Results
    from allstep.train import RunConfig


class Asked(Protocol):
    """The arguments of one study: a frozen dataclass with a field `precision`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def study(self) -> "Study":
        """Return the study for the runner."""


class Begun(NamedTuple):
    """A recipe and the overrides of every run, with the config that they make."""

    recipe: str
    overrides: tuple[str, ...]
    config: "RunConfig"


@dataclass(frozen=True)
class Runs:
    """The options of the runs of any study."""

    out: Path | None
    jobs: int | None
    retry: bool
    estimate: bool


AskedT = TypeVar("AskedT", bound=Asked)


def begin(arguments: list[str], trust: bool, own: Mapping[str, str], data: Path | None) -> Begun:
    """Read the arguments of a study's command, and find its data.

    `own` has the config keys that the study sets itself, `data` is the folder of the data. Raise
    ConfigError or DataError if no run could start.
    """
    from allstep.study.train_trial import found, refuse_overrides

    recipe, overrides = _split(arguments, trust)
    refuse_overrides(overrides, own)
    config, named = found(recipe, overrides, data)
    return Begun(recipe, (*named, *overrides), config)


def run(
    asked: AskedT,
    findings: "Callable[[AskedT, Results], Findings]",
    question: str,
    begun: Begun,
    runs: Runs,
) -> None:
    """Run the study in its folder and print its findings.

    `question` is the name of the command, from which the default folder gets its name. All runs get
    one precision.
    """
    from allstep.study import StudyFolder

    folder = StudyFolder(runs.out or _default_folder(begun.recipe, question))
    asked = replace(asked, precision=_one_precision(begun.config, folder))
    _answer(asked.study(), lambda results: findings(asked, results), folder, runs)


def _split(arguments: list[str], trust: bool) -> tuple[str, list[str]]:
    """Return the recipe or config file, and the KEY=VALUE overrides with trust=true for --trust."""
    from allstep.errors import ConfigError
    from allstep.train.config.read_config import split_arguments

    sources, overrides = split_arguments(arguments)
    if len(sources) != 1:
        found = ", ".join(map(repr, sources)) or "none"
        raise ConfigError(
            f"expected one recipe or config file, found {found}; set config keys with KEY=VALUE"
        )
    return sources[0], [*overrides, "trust=true"] if trust else overrides


def _default_folder(recipe: str, question: str) -> Path:
    """Return the default study folder. Its name has no time, so the same command finds it again."""
    return Path("studies") / f"{Path(recipe).stem}-{question}"


def _one_precision(config: "RunConfig", folder: "StudyFolder") -> str | None:
    """Return the precision for every run, or None if the recipe sets one.

    Print a line with the precision that was chosen for this machine.
    """
    from allstep.study.one_precision import one_precision

    precision = one_precision(config, folder)
    if precision is None:
        return None
    print_notice(str(precision))
    return precision.name


def _answer(
    asked: "Study",
    findings: "Callable[[Results], Findings]",
    folder: "StudyFolder",
    runs: Runs,
) -> None:
    """Run the study, then write and print its findings, also after an interruption.

    Exit with 130 after Ctrl-C, with RESUBMIT if runs stopped early and saved, with 1 if
    a run failed without having diverged. `runs.jobs` is the number of simultaneous runs
    (default: as many as have a core for each worker). With `runs.estimate`, stop once the remaining
    time is known.
    """
    from allstep.launch import RESUBMIT
    from allstep.machine import allowed_cores
    from allstep.study import run as run_study
    from allstep.study.display import shown
    from allstep.study.findings import write_findings
    from allstep.study.results import has_diverged
    from allstep.study.runner import collect

    needed = max((trial.cores for trial in asked.wanted({})), default=1)
    lanes, interrupted = runs.jobs or max(1, allowed_cores() // needed), False
    try:
        with shown(lanes) as callback:
            results = run_study(
                asked,
                folder,
                lanes,
                callback,
                lambda state: runs.estimate and state.seconds_left is not None,
                runs.retry,
                # A number of simultaneous runs that the user gives counts.
                cores=None if runs.jobs else allowed_cores(),
            )
    except KeyboardInterrupt:
        interrupted, results = True, collect(asked, folder)
    if not runs.estimate:
        command = shlex.join(["allstep", *sys.argv[1:]])
        page = write_findings(folder, findings(results), results, command)
        print(escaped(page, keep="\n"))
        _report_failures(results)
    if interrupted:
        print(
            f"interrupted after {len(results)} runs have ended; the same command resumes",
            file=sys.stderr,
        )
        raise typer.Exit(130)
    if not runs.estimate and (
        left := [trial.name for trial in asked.wanted(results) if trial.name not in results]
    ):
        print(
            f"stopped early and saved: {', '.join(left)}; the same command resumes",
            file=sys.stderr,
        )
        raise typer.Exit(RESUBMIT)
    if any(
        outcome.status == "failed" and not has_diverged(outcome) for outcome in results.values()
    ):
        raise typer.Exit(1)


def _report_failures(results: "Results") -> None:
    """Print the number of failed runs to standard error, if there are any."""
    num_failed = sum(outcome.status == "failed" for outcome in results.values())
    if num_failed:
        print(f"{num_failed} of {len(results)} runs failed; --retry repeats them", file=sys.stderr)
