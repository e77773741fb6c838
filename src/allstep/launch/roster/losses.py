"""The failures of a generation, and whether they are an error of the program.

A worker that dies is replaced; an error of the program would kill each replacement too. It is one
if a member exits with 2 (bad input), if all members of a generation end with the same traceback, or
if a traceback occurs at the same number of updates in a second generation: the step was repeated
and failed again. Twice within one generation is not enough: a full disk of one host ends several
ranks alike, and the ranks of other hosts can continue. A consequence of another rank's failure
(`cause`) is never an error of the program.
"""

from dataclasses import dataclass

from allstep.launch import cause
from allstep.launch.cause import Failure

BAD_INPUT = 2


@dataclass(frozen=True)
class Loss:
    """The failure of a worker. signature: of its traceback. updates: in its state, at the end."""

    worker: int
    failure: Failure
    signature: str = ""
    updates: int = 0

    @property
    def position(self) -> tuple[str, int] | None:
        """Return the traceback and where it occurred; None if that identifies no own error."""
        if not self.signature or self.failure.is_consequence:
            return None
        return self.signature, self.updates


class Losses:
    """The failures since the last plan: of members, and of workers before they joined."""

    def __init__(self) -> None:
        self.of_members: list[Loss] = []
        self.before_joining: list[Loss] = []
        self._earlier: set[tuple[str, int]] = set()

    def add(self, loss: Loss) -> bool:
        """Record the failure of a member; return whether it is an error of the program."""
        self.of_members.append(loss)
        return loss.failure.code == BAD_INPUT or loss.position in self._earlier

    def start_generation(self) -> None:
        """Forget the failures from which the run has recovered, except where they occurred."""
        self._earlier |= {loss.position for loss in self.of_members if loss.position}
        self.of_members.clear()
        self.before_joining.clear()

    def are_alike(self, size: int) -> bool:
        """Return whether all members of a generation of that size ended with one traceback."""
        signatures = {loss.signature for loss in self.of_members}
        if len(self.of_members) < size or len(signatures) != 1 or "" in signatures:
            return False
        return not self.first.is_consequence

    @property
    def failures(self) -> list[Failure]:
        """Return the failures of members."""
        return [loss.failure for loss in self.of_members]

    @property
    def first(self) -> Failure:
        """Return the failure that caused the others."""
        return cause.first(self.failures)
