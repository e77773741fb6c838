"""What a party takes and what it leaves: `Claim` and `Push`, plain values."""

from typing import NamedTuple


class Claim(NamedTuple):
    """Samples that a party has taken, for one step.

    start, count: the first of them and their number, as positions of the run. is_last: whether the
    push follows this step; only `lazy:K` has several steps in a push.
    """

    start: int
    # The name hides a method of tuples that is of no use here.
    count: int  # type: ignore[assignment]
    is_last: bool = True


class Push(NamedTuple):
    """One update of the weights, as the order log has it.

    party: the rank that pushed. start, count: its samples, as positions of the run. step: the
    samples of each of its steps; the last one may have fewer. read: the version of the weights from
    which the gradient was computed. made: the version that it made. lrs: the learning rate of each
    parameter group. is_torn: whether the party was killed in the middle.
    """

    party: int
    start: int
    # The name hides a method of tuples that is of no use here.
    count: int  # type: ignore[assignment]
    step: int
    read: int
    made: int
    lrs: tuple[float, ...]
    is_torn: bool = False

    @property
    def age(self) -> int:
        """The updates of others between the read and this update."""
        return self.made - 1 - self.read

    @property
    def claims(self) -> list[Claim]:
        """The steps of the push."""
        return steps_of(self.start, self.count, self.step)


def steps_of(start: int, count: int, step: int) -> list[Claim]:
    """Return the steps into which a block of `count` samples is divided."""
    end = start + count
    return [Claim(at, min(step, end - at), at + step >= end) for at in range(start, end, step)]
