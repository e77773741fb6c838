"""Training: the one package where data, models, optimizers, norms and communication meet.

```
config | precision       what a run is, checked and resolved; the number format it computes in
input | watch | folder   splits and loaders; events and callbacks; the run folder
task                     what is learned: losses, tally, metrics, kind of input
score                    losses and accuracies, counted once per sample; wrong predictions
step                     one update: forward, backward, reduce, update; running statistics, EMA
checkpoint               written whole or not at all, restored at any number of workers
health                   divergence, stop requests, equal replicas
run                      a whole run: set-up, loop, finish
check | use              rehearsals and comparisons; evaluate and predict with a trained model
```

A module imports only from rows above its own, and of other packages all below `train` but the
front-ends and the engine. Start reading at `step/step.py`, then `run/loop.py`. The names exported
here load torch when they are first used (PEP 562), so that a launcher can read a config without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.train.config.read_config import read_config
from allstep.train.config.recipes import RECIPES
from allstep.train.config.run_config import RunConfig

if TYPE_CHECKING:
    from allstep.train.run.loop import train
    from allstep.train.use.load_run import load_run
    from allstep.train.use.predict import predict
    from allstep.train.watch.callback import Callback
    from allstep.train.watch.events import Evaluated, Opening, Progress, Result, Score

__all__ = [
    "RECIPES",
    "Callback",
    "Evaluated",
    "Opening",
    "Progress",
    "Result",
    "RunConfig",
    "Score",
    "load_run",
    "predict",
    "read_config",
    "train",
]

_EVENTS = ("Evaluated", "Opening", "Progress", "Result", "Score")
_MODULES = {
    "Callback": "watch.callback",
    "load_run": "use.load_run",
    "predict": "use.predict",
    "train": "run.loop",
    **dict.fromkeys(_EVENTS, "watch.events"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(
            f"module 'allstep.train' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(f"allstep.train.{_MODULES[name]}"), name)
