"""`allstep replay`: recompute an asynchronous run from its order log, and compare the weights."""

from typing import TYPE_CHECKING

import typer

from allstep.cli.saved_run.predict import RunFolder, Trust
from allstep.console.escape import print_line

if TYPE_CHECKING:
    from allstep.train.check.replay import Replayed

_NAMED = 5
"""Tensors that differ of which the output has a line."""


def replay(run: RunFolder, trust: Trust = False) -> None:
    """Recompute a run with sync=async, stale, clock or lazy from its order log.

    One process repeats every push of the run, on the same samples and from the same weights, and
    compares the result with the newest checkpoint, bit by bit. The exit status is 1 if they differ.
    """
    from allstep.train.check.replay import replay_run

    replayed = replay_run(run, trust)
    for line in lines(replayed):
        print_line(line)
    if not replayed.is_equal:
        raise typer.Exit(1)


def lines(replayed: "Replayed") -> list[str]:
    """Return the outcome of a replay as text."""
    begin, end = replayed.begin, replayed.end
    found = [
        f"replayed {replayed.pushes:,} pushes of {replayed.parties}"
        f" part{'y' if replayed.parties == 1 else 'ies'} in {replayed.rounds} rounds, from sample"
        f" {begin:,} to {end:,}, in {replayed.seconds:.1f} s"
    ]
    if replayed.torn:
        return [*found, f"{replayed.torn}: nothing from there on can be repeated"]
    if replayed.is_equal:
        return [*found, f"equal bit by bit: all {replayed.num_tensors} tensors of the checkpoint"]
    found.append(
        f"DIFFERENT: {len(replayed.different)} of the {replayed.num_tensors} tensors of the"
        " checkpoint"
    )
    several = sorted(replayed.different.items(), key=lambda each: -each[1])
    return found + [f"  {name}: largest difference {most:.3g}" for name, most in several[:_NAMED]]
