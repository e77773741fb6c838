"""The callback that averages what `fit` reports over all ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allstep.hvd.objects import allgather_object
from allstep.hvd.place import size
from allstep.keras_shared.collective_callbacks import Collective, Dialect


class MetricAverage(Collective):
    """Replaces each entry of the logs by its mean over the ranks, at the end of each epoch.

    Put it before callbacks that use metrics, such as ReduceLROnPlateau: they get the same dict.
    `device`: not used; Horovod's signature. The means are those of all samples if all ranks have
    equally many; `hvd.evaluate` is exact for any shares.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs in place. A collective."""
        if logs is not None and size() > 1:
            logs.update(mean_logs(allgather_object(_plain(self._keras, logs), "keras.metrics")))


def mean_logs(logs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each entry; `logs`: by rank. Raise ValueError if the names differ."""
    for rank, each in enumerate(logs):
        if each.keys() != logs[0].keys():
            raise ValueError(
                f"rank 0 has the metrics {', '.join(logs[0])}, rank {rank} {', '.join(each)}: give"
                " model.compile the same metrics on all ranks, and model.fit validation data on all"
                " ranks or on none"
            )
    return {name: _mean([each[name] for each in logs]) for name in logs[0]}


def _plain(dialect: Dialect, logs: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of the logs as float64 arrays, in the order of their names."""
    arrays = {name: dialect.to_array(logs[name]) for name in sorted(logs)}
    return {
        name: array.astype(np.float64)
        for name, array in arrays.items()
        if array.dtype.kind in "fiubV"
    }


def _mean(values: "Sequence[np.ndarray[Any, Any]]") -> Any:
    """Return the mean over the ranks: a number for numbers, an array for arrays."""
    mean = np.mean(np.stack(values), axis=0)
    return float(mean) if mean.ndim == 0 else mean
