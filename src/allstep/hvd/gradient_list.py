"""The gradients of a step of another framework than torch, as one list (D20).

```
front-end       views of its framework's gradients, in one call per step
GradientList    from init() to shutdown(), join, Horovod's errors
ArrayList       the sums (`parallel.exchange.array_list`)
```

The ranks of a process set match their lists by the order in which they use them first
(`use_order`). Nothing is communicated before the first `reduce`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from allstep import faults
from allstep.faults.injector import Injector
from allstep.hvd import use_order
from allstep.hvd.attached import keep_attached
from allstep.hvd.exceptions import horovods_errors
from allstep.hvd.gradient_group import gradient_group, registered_number
from allstep.hvd.gradient_listener import TimelineListener
from allstep.hvd.place import running
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import REDUCTIONS, Average
from allstep.parallel.exchange import ArrayList, Rule
from allstep.parallel.exchange.array_list import without_values

Compress = Callable[[Tensor], tuple[Tensor, Any]]
Decompress = Callable[[Tensor, Any], Tensor]

_TIMELINE = TimelineListener()


class GradientList:
    """Reduces the same list of arrays in each step, on all ranks of a process set.

    `named`: a name for each array, and a tensor with its shape and dtype (its values are not used).
    All names get a number if some are equal: frameworks do not keep them apart.
    `op`: Average, Sum, Min, Max or Product. `in_place`: whether the arrays may be written to;
    otherwise the results are in memory of our own. `compress`, `decompress`: applied to an array
    before and after it is sent.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        *,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        in_place: bool = False,
        compress: Compress | None = None,
        decompress: Decompress | None = None,
    ) -> None:
        names = _unique([name for name, _ in named])
        likes = [without_values(like) for _, like in named]
        self._named = list(zip(names, likes, strict=True))
        self._rule = Rule(
            kind=REDUCTIONS[op], mean=op == Average, compress=compress, decompress=decompress
        )
        self._process_set, self._in_place = process_set, in_place
        self._list: ArrayList | None = None
        self._key: str | None = None
        self._steps = 0
        keep_attached(self)

    @property
    def key(self) -> str:
        """The key of this list in this world, the same on all ranks of its set."""
        if self._key is None:
            self._key = use_order.key_of(self, registered_number(self._process_set))
        return self._key

    def reduce(
        self, arrays: Sequence[Tensor | None], weight: float | None = None
    ) -> list[Tensor | None]:
        """Return the reduced arrays; None for those that no rank has.

        `arrays`: one for each name; None where this rank has none. `weight`: the number of samples
        behind them, on all ranks or on none. On a set of one rank the arrays themselves are
        returned. Raise HorovodInternalError if another rank is lost.
        """
        if faults.active is not None:
            return self._reduce_in_step(faults.active, arrays, weight)
        return self._reduce(arrays, weight)

    def _reduce_in_step(
        self, injector: Injector, arrays: Sequence[Tensor | None], weight: float | None
    ) -> list[Tensor | None]:
        """Reduce as one step, in which faults may occur; weights are not known here."""
        injector.in_step(unable=("flip",))
        if injector.takes("nan"):
            arrays = [None if array is None else array * math.nan for array in arrays]
        injector.reduce_begins()
        results = self._reduce(arrays, weight)
        injector.update_begins()
        injector.step_ends()
        return results

    def _reduce(self, arrays: Sequence[Tensor | None], weight: float | None) -> list[Tensor | None]:
        if not self._reduces():
            return list(arrays)
        self._steps += 1
        with horovods_errors():
            running().notice(self.key, self._steps)
            return self._arrays().reduce(arrays, weight)

    def _arrays(self) -> ArrayList:
        """Return the list; it is made at the first step, in which all ranks participate."""
        if self._list is None:
            self._list = ArrayList(
                gradient_group(self._process_set),
                self.key,
                self._named,
                self._rule,
                in_place=self._in_place,
                listener=_TIMELINE,
            )
        return self._list

    def _participate(self, number: int) -> None:
        """Contribute nothing to a step of the other ranks; called once this rank has joined."""
        self._steps = number
        with horovods_errors():
            self._arrays().participate()

    # From init() to shutdown()

    def _reduces(self) -> bool:
        """Return whether other ranks reduce with this one; raise if the set is not registered."""
        if not self._process_set.included():
            return False
        registered_number(self._process_set)
        return (self._process_set.size() or 0) > 1

    def _attach_to_engine(self) -> None:
        self._steps = 0
        self._key = None
        if self._process_set.included():
            use_order.add(self, self._process_set.process_set_id)

    def _detach_from_engine(self) -> None:
        made, self._list = self._list, None
        if made is not None:
            made.close()


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, with a number each if some are equal."""
    if len(set(names)) == len(names):
        return list(names)
    return [f"{number}:{name}" for number, name in enumerate(names)]
