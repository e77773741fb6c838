"""Training: the one place where data, nets, optimizers and communication meet.

`config` says what a run is, `recipes` holds the ready-made ones, `prepare` makes sure before anything starts that it can run, `run`
runs it in each worker with the step of `loop`. Only the last two need torch, so they are fetched when first asked for (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.train.config import RunConfig
from allstep.train.recipes import RECIPES
from allstep.train.source import read_config

if TYPE_CHECKING:
    from allstep.train.run import train
    from allstep.train.watch import Result

__all__ = ["RECIPES", "Result", "RunConfig", "read_config", "train"]


def __getattr__(name: str) -> Any:
    home = {"Result": "allstep.train.watch", "train": "allstep.train.run"}.get(name)
    if home is None:
        raise AttributeError(f"module 'allstep.train' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(home), name)
