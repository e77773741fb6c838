"""`DistributedOptimizer`: an MXNet optimizer whose updates use the gradients of all ranks.

    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", rescale_grad=1 / batch))
    module.fit(..., kvstore=None, optimizer=optimizer)

For the Module API and for scripts with an updater of their own; Gluon has `DistributedTrainer`.
MXNet passes gradients to an optimizer one by one or in groups of a few; each call is one reduction.

The gradients are summed, and the wrapped optimizer's `rescale_grad` is divided by the number of
ranks: an update uses the mean.
"""

from typing import Any

from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import number_of
from allstep.mxnet.framework import mx
from allstep.mxnet.mpi_ops import Sum, allreduce_, grouped_allreduce_
from allstep.mxnet.mxnet_errors import InvalidArgument, mxnets_errors
from allstep.mxnet.ndarray_views import NDArray

_OWN = ("_optimizer", "_gradient_predivide_factor", "_num_groups", "_process_set", "_factor")


# MXNet has no types, so its classes are Any for mypy.
class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer like `optimizer`, with the gradients of all ranks.

    Attributes are those of the wrapped optimizer, for reading and writing.

    - `gradient_predivide_factor`: the part of the division by the number of ranks that happens
      before the sum, against overflow of float16. Default: 1.0.
    - `num_groups`: Horovod's number of groups of gradients. It is checked and kept; here the
      gradients of one call are always reduced together.
    - `process_set`: the ranks whose gradients are reduced. Default: all ranks. A rank outside
      updates with its own gradients.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_optimizer(optimizer)
        check_options(gradient_predivide_factor, num_groups)
        with mxnets_errors():
            self._factor = mean_factor(process_set, gradient_predivide_factor)
        self._optimizer = optimizer
        self._gradient_predivide_factor = gradient_predivide_factor
        self._num_groups, self._process_set = num_groups, process_set
        optimizer.rescale_grad *= self._factor

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __reduce__(self) -> Any:
        """Return how to pickle it: with the wrapped optimizer, whose scale is not changed again."""
        state = {name: self.__dict__[name] for name in _OWN}
        if self._process_set is global_process_set:
            del state["_process_set"]
        return _unpickled, (state,)

    # The methods that an optimizer implements

    def create_state(self, index: Any, weight: NDArray) -> Any:
        """Return the wrapped optimizer's state for a weight."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: NDArray) -> Any:
        """Return the wrapped optimizer's state for a weight that may be of float16."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduce the gradients in place, then update the weights."""
        self._reduce(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduce the gradients in place, then update weights that may be of float16."""
        self._reduce(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def _reduce(self, index: Any, grad: Any) -> None:
        """Sum gradients over the ranks; `index` is a number or name, or a list of them."""
        if not reduces(self._process_set):
            return
        how: dict[str, Any] = {
            "op": Sum,
            "prescale_factor": 1.0 / self._gradient_predivide_factor,
            "process_set": self._process_set,
        }
        if not isinstance(index, (list, tuple)):
            allreduce_(grad, name=str(index), **how)
        elif index:
            grouped_allreduce_(list(grad), name=f"{index[0]}:{index[-1]}", **how)


def _unpickled(state: dict[str, Any]) -> DistributedOptimizer:
    made: DistributedOptimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    for name, value in {"_process_set": global_process_set, **state}.items():
        setattr(made, name, value)
    return made


# What optimizer and trainer share


def reduces(process_set: ProcessSet) -> bool:
    """Return whether this rank reduces gradients: it is one of several ranks of the set."""
    number_of(process_set)
    return process_set.included() and (process_set.size() or 0) > 1


def mean_factor(process_set: ProcessSet, predivide: float) -> float:
    """Return the factor that makes a mean of a sum whose gradients were divided by `predivide`."""
    return predivide / (process_set.size() or 1) if reduces(process_set) else 1.0


def check_optimizer(optimizer: Any) -> None:
    """Raise InvalidArgument unless it is an optimizer that is not distributed already."""
    if isinstance(optimizer, DistributedOptimizer):
        raise InvalidArgument(
            "DistributedOptimizer of a DistributedOptimizer: its gradients would be reduced twice;"
            " wrap the optimizer once"
        )
    if not isinstance(optimizer, mx.optimizer.Optimizer):
        raise InvalidArgument(
            f"found {optimizer!r}, expected an optimizer: write"
            " hvd.DistributedOptimizer(mx.optimizer.create('sgd', learning_rate=0.1))"
        )


def check_options(predivide: float, num_groups: int) -> None:
    """Raise InvalidArgument for options that have no meaning."""
    if not predivide > 0:
        raise InvalidArgument(f"gradient_predivide_factor={predivide}: it must be above 0")
    if num_groups < 0:
        raise InvalidArgument(f"num_groups={num_groups}: it must be 0 or more")
