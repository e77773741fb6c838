"""The protocol of the object that combines the gradients of the ranks for an optimizer.

```
for each complete gradient        exchange.ready(parameter, weight, wanted)    reduction may start
at the end of backward            exchange.reduce(weight, wanted=wanted)       waits for all
after each reduce, on all ranks   exchange.norms()                             squared norms, if
                                                                               wanted
at the end                        exchange.close()
```
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
    """What is computed: the sum over ranks of their gradients, times `factor`.

    `kind`: torch's reduction. `mean`: divide by the number of ranks, or of samples. `compress`,
    `decompress`: functions applied to a gradient before and after it is sent. `densify`: make
    sparse gradients dense and reduce them as such; `Exchange.densified` lists them.
    """

    kind: Any = ReduceOp.SUM
    mean: bool = True
    factor: float = 1.0
    compress: Compress | None = None
    decompress: Decompress | None = None
    densify: bool = False


class Listener(Protocol):
    """An object that is notified of each reduction, such as a timeline."""

    def is_listening(self) -> bool:
        """Return whether times must be measured."""

    def reduced(self, named: Sequence[Named], began: int, agreed: int, ended: int) -> None:
        """Record parameters that were reduced together.

        `began`, `agreed`, `ended`: when the reduction began, when the ranks had agreed on what to
        reduce, and when it ended; nanoseconds of `time.monotonic_ns`.
        """


class Exchange(Protocol):
    """Combines the gradients of the ranks. All ranks make it, and call it, together."""

    named: list[Named]
    """The parameters, in the order that all ranks have agreed on."""
    used: set[int]
    """The numbers of the parameters for which some rank had a gradient in the last step."""
    densified: list[Named]
    """The parameters of the last step that were sparse on some rank and are dense now."""
    present: int
    """The number of ranks that participated in the last step."""
    own: Squares | None
    """Squares of our own gradients while norms are measured.

    The caller adds the gradients that it reduces itself.
    """
    mean: Squares | None
    """Squares of our slice of the result, while norms are measured."""

    def ready(
        self, parameter: Parameter, weight: float | None = None, wanted: Wanted = NOTHING
    ) -> None:
        """Record that the gradient of a parameter is complete; its reduction may start.

        `weight`, `wanted`: as in `reduce`; the same in all calls of a step.
        """

    def reduce(
        self, weight: float | None = None, absent: bool = False, wanted: Wanted = NOTHING
    ) -> list[Named]:
        """Wait until every gradient is reduced according to the rule.

        Return the parameters that are sparse on some rank: the caller must reduce them.

        `weight`: the number of samples behind this rank's gradients, which are then treated as a
        mean over them; on all ranks or on none. `absent`: this rank has nothing to add and needs no
        result; it participates so that the other ranks can continue. `wanted`: what `norms` must
        return afterwards; the same on all ranks that are not absent.
        """

    def norms(self) -> GradientNorms | None:
        """Return the norms of the last `reduce`, if it measured them.

        All ranks call it together after each `reduce`, including those that were absent.
        """

    def scale_by(self, factor: float) -> None:
        """Multiply the results of `reduce` on this rank, except for sparse gradients."""

    def close(self) -> None:
        """Drop reductions in progress, and end threads."""
