"""Training: the one place where data, nets, optimizers and communication meet.

`config` says what a run is, `recipes` holds the ready-made ones, `prepare` makes sure before anything starts that it can run, `run`
runs it in each worker with the step of `loop`. Only the last two need torch, so they are fetched when first asked for (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.train.config.read import read_config
from allstep.train.config.recipes import RECIPES
from allstep.train.config.run_config import RunConfig

if TYPE_CHECKING:
    from allstep.train.run.loop import train
    from allstep.train.watch.events import Result

__all__ = ["RECIPES", "Result", "RunConfig", "read_config", "train"]


def __getattr__(name: str) -> Any:
    home = {"Result": "allstep.train.watch.events", "train": "allstep.train.run.loop"}.get(name)
    if home is None:
        raise AttributeError(f"module 'allstep.train' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(home), name)
