"""What an optimizer asks of the object that brings the gradients of the ranks together.

for each parameter whose gradient is complete:  exchange.ready(parameter, weight, wanted)     may
begin to travel at the end of backward:                         exchange.reduce(weight,
wanted=wanted)        waits until all is done after each reduce, on all ranks:
exchange.norms()                              squared norms, if wanted when it is not needed any
more:                 exchange.close()
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import ReduceOp
from torch.nn import Parameter

from allstep.comm.op.norms import NOTHING, GradientNorms, Squares, Wanted
from allstep.parallel.exchange.parameter_order import Named

Compress = Callable[[Tensor], tuple[Tensor, Any]]
Decompress = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Rule:
    """What is computed. The sum over ranks of what each contributes, times `factor`; a mean divides
    by the ranks, or by samples.

    kind: torch's reduction. compress, decompress: what gradients are turned into before they
    travel, and back. densify: sparse gradients are made dense and reduced as such, and are named in
    `Exchange.densified`.
    """

    kind: Any = ReduceOp.SUM
    mean: bool = True
    factor: float = 1.0
    compress: Compress | None = None
    decompress: Decompress | None = None
    densify: bool = False


class Listener(Protocol):
    """Hears of each reduction, as a timeline does."""

    def is_listening(self) -> bool:
        """Whether times are to be taken."""

    def reduced(self, named: Sequence[Named], began: int, agreed: int, ended: int) -> None:
        """These parameters were reduced together.

        began, agreed, ended: when it began, when the ranks had agreed on what there is to reduce,
        and when it was over; nanoseconds of `time.monotonic_ns`.
        """


class Exchange(Protocol):
    """Brings the gradients of the ranks together. All ranks make it, and call it, together."""

    named: list[Named]
    """The parameters, in the order that all ranks have agreed on."""
    used: set[int]
    """Parameters, by number, for which some rank had a gradient in the last step."""
    densified: list[Named]
    """Those of the last step that were sparse on some rank and are dense now."""
    present: int
    """Ranks that took part in the last step."""
    own: Squares | None
    """Of our own gradients, while they are measured: what the caller reduces by itself is added to
    it."""
    mean: Squares | None
    """Of our part of the result, likewise."""

    def ready(
        self, parameter: Parameter, weight: float | None = None, wanted: Wanted = NOTHING
    ) -> None:
        """The gradient of this parameter is complete. weight, wanted: as in `reduce`; the same in
        all calls of a step."""

    def reduce(
        self, weight: float | None = None, absent: bool = False, wanted: Wanted = NOTHING
    ) -> list[Named]:
        """Wait until every gradient is what the rule says. Returns those that are sparse on some
        rank: they are left to the caller.

        weight: the samples behind this rank's gradients, which are then taken for a mean over them;
        on all ranks or on none. absent: this rank has nothing to add and wants nothing; it takes
        part so that the others can go on. wanted: what `norms` shall know afterwards; alike on all
        ranks that are not absent.
        """

    def norms(self) -> GradientNorms | None:
        """Of the last `reduce`, if it measured them.

        All ranks call it together after each, also those that were absent.
        """

    def scale_by(self, factor: float) -> None:
        """Multiply what `reduce` left to us, but for sparse gradients."""

    def close(self) -> None:
        """Drop what is under way, and end threads."""
