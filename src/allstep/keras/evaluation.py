"""Exact evaluation on any number of workers: each sample counts once.

Every rank evaluates its share of the samples. The states of Keras's metrics are sums (a total and a
count, or a table), so their sums over the ranks are the states of one worker, and `result()` gives
its values. The loss is such a metric, too.
"""

from typing import Any

import keras
import numpy as np

from allstep.hvd.handles import perform_group
from allstep.hvd.place import rank, size
from allstep.hvd.process_sets import global_process_set
from allstep.hvd.requests import Average, Sum, group_names, reduction
from allstep.keras.framework_arrays import from_torch, to_array, to_torch
from allstep.keras.global_batches import as_array, common_length, share_of

_OPERATIONS = {"sum": Sum, "mean": Average}
"""The reduction for each `aggregation` of a metric's variable."""


def evaluate(
    model: Any,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    verbose: int | str = 0,
    sample_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """Return the loss and metrics of a model on all samples, the same on all ranks. A collective.

    - `model`: a compiled model, with the same weights on all ranks.
    - `x`, `y`: arrays, or lists or dicts of arrays, with all samples, the same on all ranks.
    - `batch_size`: the number of samples of a step on one rank (default: 32, as in Keras).
    - `verbose`: 1 shows progress (default: 0).
    - `sample_weight`: a weight for each sample (default: 1).
    - `return_dict`: whether to return a dict by name, not a list (default: False).
    """
    data = keras.tree.map_structure(as_array, (x, y, sample_weight), none_is_leaf=False)
    samples = np.arange(common_length([each for each in data if each is not None]))
    _evaluate_share(model, data, samples, batch_size, verbose)
    add_states(model)
    logs = {name: _plain(value) for name, value in model.get_metrics_result().items()}
    # The order of `model.evaluate`, which has no public function.
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate_share(
    model: Any,
    data: tuple[Any, Any, Any],
    samples: "np.ndarray[Any, Any]",
    batch_size: int | None,
    verbose: int | str,
) -> None:
    """Update the metrics by this rank's samples."""
    share = share_of(samples)
    # A metric has its states only after a batch; they return to 0 if the share is empty.
    taken = share if len(share) else samples[:1]
    x, y, weights = keras.tree.map_structure(lambda array: array[taken], data, none_is_leaf=False)
    model.evaluate(x, y, batch_size, verbose if rank() == 0 else 0, weights)
    if not len(share):
        model.reset_metrics()


def add_states(model: Any) -> None:
    """Replace the states of all metrics by their sums over the ranks. A collective."""
    states = [(metric, state) for metric in model.metrics for state in metric.variables]
    if size() == 1 or not states:
        return
    tensors = [to_torch(_wide(to_array(state))) for _, state in states]
    model.reset_metrics()
    for metric, state in states:
        _check_sum(metric, state)
    names = group_names("grouped_allreduce", "keras.states", tensors)
    requests = [
        reduction(tensor, None, name, _operation(*each), 1.0, 1.0, global_process_set)
        for each, tensor, name in zip(states, tensors, names, strict=True)
    ]
    for (_, state), total in zip(states, perform_group(requests), strict=True):
        state.assign(from_torch(total).astype(_numpy_type(state)))


def _operation(metric: Any, state: Any) -> int:
    """Return how the states of the ranks are combined; raise ValueError if that is unknown."""
    aggregation = getattr(state, "aggregation", "sum")
    if aggregation not in _OPERATIONS:
        raise ValueError(
            f"metric {metric.name}: its state {state.name} has aggregation={aggregation!r}, which"
            " cannot be combined over ranks; create it with aggregation='sum' or 'mean'"
        )
    return _OPERATIONS[aggregation]


def _check_sum(metric: Any, state: Any) -> None:
    """Raise ValueError if a state does not start at 0: it is not a sum, such as a minimum."""
    if np.any(to_array(state)):
        raise ValueError(
            f"metric {metric.name}: its state {state.name} starts at {to_array(state)}, not at 0,"
            " so it is not a sum and cannot be combined over ranks; use model.evaluate for it"
        )


def _wide(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return a state with enough digits for the sum: float64 or int64."""
    return array.astype(np.int64 if array.dtype.kind in "iub" else np.float64)


def _numpy_type(state: Any) -> Any:
    return to_array(state).dtype


def _plain(value: Any) -> Any:
    """Return a result as a number, or as an array if it has several."""
    array = to_array(value)
    return float(array) if array.ndim == 0 else array
