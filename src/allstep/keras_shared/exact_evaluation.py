"""Exact evaluation on any number of workers: each sample counts once.

Every rank evaluates its share of the samples. The states of Keras's metrics are sums (a total and a
count, or a table), so their sums over the ranks are the states of one worker, and `result()` gives
its values. The loss is such a metric, too.
"""

import importlib
from typing import Any

import numpy as np
import torch

from allstep.hvd.handles import perform_group
from allstep.hvd.place import rank, size
from allstep.hvd.process_sets import global_process_set
from allstep.hvd.requests import Average, Sum, group_names, reduction
from allstep.keras_shared.collective_callbacks import Dialect
from allstep.keras_shared.sample_arrays import common_length, map_arrays, share_of
from allstep.keras_shared.which_keras import front_end_of

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

    - `model`: a compiled model of Keras 3 or Keras 2, with the same weights on all ranks.
    - `x`, `y`: arrays, or lists or dicts of arrays, with all samples, the same on all ranks.
    - `batch_size`: the number of samples of a step on one rank (default: 32, as in Keras).
    - `verbose`: 1 shows progress (default: 0).
    - `sample_weight`: a weight for each sample (default: 1).
    - `return_dict`: whether to return a dict by name, not a list (default: False).
    """
    dialect = _dialect_of(model)
    dialect.check_exact("hvd.evaluate")
    data = map_arrays(dialect.as_array, (x, y, sample_weight))
    samples = np.arange(common_length(data))
    _evaluate_share(model, data, samples, batch_size, verbose)
    add_states(dialect, model)
    results = model.get_metrics_result()
    logs = {name: _plain(dialect.to_array(value)) for name, value in results.items()}
    return logs if return_dict else dialect.in_order(model, logs)


def _dialect_of(model: Any) -> Dialect:
    dialect: Dialect = importlib.import_module(f"{front_end_of(model).__name__}.dialect")
    return dialect


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
    x, y, weights = map_arrays(lambda array: array[taken], data)
    model.evaluate(x, y, batch_size, verbose if rank() == 0 else 0, weights)
    if not len(share):
        model.reset_metrics()


def add_states(dialect: Dialect, model: Any) -> None:
    """Replace the states of all metrics by their sums over the ranks. A collective."""
    states = [(metric, state) for metric in model.metrics for state in metric.variables]
    if size() == 1 or not states:
        return
    arrays = [dialect.to_array(state) for _, state in states]
    model.reset_metrics()
    operations = [_operation(dialect, metric, state) for metric, state in states]
    tensors = [torch.from_numpy(_wide(array)) for array in arrays]
    names = group_names("grouped_allreduce", "keras.states", tensors)
    requests = [
        reduction(tensor, None, name, operation, 1.0, 1.0, global_process_set)
        for operation, tensor, name in zip(operations, tensors, names, strict=True)
    ]
    totals = perform_group(requests)
    for (_, state), array, total in zip(states, arrays, totals, strict=True):
        dialect.assign(state, total.numpy().astype(array.dtype))


def _operation(dialect: Dialect, metric: Any, state: Any) -> int:
    """Return how the states of the ranks are combined; raise ValueError if that is unknown."""
    aggregation = dialect.aggregation(state)
    if aggregation not in _OPERATIONS:
        raise ValueError(
            f"metric {metric.name}: its state {state.name} has aggregation={aggregation!r}, which"
            " cannot be combined over ranks; create it with aggregation='sum' or 'mean'"
        )
    start = dialect.to_array(state)
    # Not a sum, for example a minimum.
    if np.any(start):
        raise ValueError(
            f"metric {metric.name}: its state {state.name} starts at {start}, not at 0,"
            " so it is not a sum and cannot be combined over ranks; use model.evaluate for it"
        )
    return _OPERATIONS[aggregation]


def _wide(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return a state with enough digits for the sum: float64 or int64."""
    return array.astype(np.int64 if array.dtype.kind in "iub" else np.float64)


def _plain(array: "np.ndarray[Any, Any]") -> Any:
    """Return a result as a number, or as an array if it has several."""
    return float(array) if array.ndim == 0 else array
