"""The public names of this package besides the optimizer."""

from allstep.keras import callbacks, elastic
from allstep.keras.callbacks import BroadcastGlobalVariablesCallback
from allstep.keras.evaluation import evaluate
from allstep.keras.global_batches import Batches, batches
from allstep.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from allstep.keras.variables import broadcast_variables

__all__ = [
    "Batches",
    "BroadcastGlobalVariablesCallback",
    "allgather",
    "allreduce",
    "batches",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "evaluate",
    "reducescatter",
]
