"""What `state.json` of a checkpoint must hold: looked at before anything is built from it.

A checkpoint whose checksums are right may still be of another version, of another person, or made
by hand. A value of the wrong type would end a resumed run with a traceback, far from the file; here
it makes the checkpoint a damaged one, and the next older one is used.

`check_resumed` is for a run that continues, `check_used` for `predict` and `eval`, which need less.
Both are for `checkpoint.newest`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from math import prod
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from torch import nn

from allstep.errors import CheckpointError, ConfigError
from allstep.optim import RunningNoiseScale
from allstep.train.checkpoint.files import Snapshot
from allstep.train.checkpoint.optimizer_state import MAX_VALUE, is_like
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.health.divergence import LossWatch
from allstep.train.step.batch_growth import batches
from allstep.train.step.build import make_optimizer
from allstep.train.step.execution import WAYS
from allstep.train.watch.events import Score

_Whole = Annotated[int, Field(ge=0, lt=1 << 60)]
_Count = Annotated[int, Field(ge=1, lt=1 << 60)]
_Side = Annotated[int, Field(ge=1, le=1 << 16)]
_Shape = Annotated[list[_Side], Field(min_length=3, max_length=3)]
_Precision = Literal["float32", "bfloat16", "float16", "float64"]
_Sums = Annotated[list[float], Field(min_length=4, max_length=4)]
_MOST_VALUES = 1 << 26
"""Of one image, 8,192 x 8,192 in one channel: its memory is taken before other errors are found."""


class _State(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


def _like(kind: type[Any]) -> Any:
    """A model with the fields of a dataclass, and no others: it is made by `kind(**plain)`."""
    hints = get_type_hints(kind)
    made = {
        each.name: (hints[each.name], ... if each.default is MISSING else each.default)
        for each in fields(kind)
    }
    return create_model(kind.__name__, __config__=ConfigDict(strict=True, extra="forbid"), **made)  # type: ignore[call-overload]


_Score: Any = _like(Score)
_LossWatch: Any = _like(LossWatch)
_Noise: Any = _like(RunningNoiseScale)


class _Position(_State):
    samples: _Whole
    best: _Score | None
    best_samples: _Whole


class _Standing(_Position):
    updates: _Whole
    batch: _Count
    worse: _Whole
    since: _Sums
    owes: _Whole | None


class _Optimizer(_State):
    names: list[str]
    values: dict[str, Any]
    groups: list[dict[str, Any]]


class _Loader(_State):
    position: _Whole


class _Scaled(_State):
    name: _Precision | None = None
    scale: float
    steps_since: _Whole


class _Growth(_State):
    times: _Whole
    last: _Whole
    room: _Whole = 0


class _Ema(_State):
    updates: _Whole


class _Classes(_State):
    classes: Annotated[list[str], Field(min_length=1)]


class _Images(_Classes):
    shape: _Shape
    trained_shape: _Shape | None = None
    mean: list[float]
    std: list[float]
    prepare: str


class _Resumed(_State):
    standing: _Standing
    optimizer: _Optimizer
    loader: _Loader
    precision: _Scaled
    growth: _Growth
    watch: _LossWatch
    execution: str
    pictures: _Classes = _Classes.model_construct(classes=[])
    ema: _Ema | None = None
    noise: _Noise | None = None


class _Used(_State):
    standing: _Position
    pictures: _Images


def check_resumed(snapshot: Snapshot) -> None:
    """CheckpointError unless a run can continue from the state, as far as types and ranges show."""
    state = _checked(_Resumed, snapshot)
    if state.noise is not None:
        try:
            RunningNoiseScale(**state.noise.model_dump())
        except ConfigError as error:
            raise CheckpointError(f"state.json: noise: {error}") from error
    if state.execution not in WAYS:
        raise CheckpointError(
            f"state.json: execution: expected one of {', '.join(WAYS)}, found"
            f" {state.execution[:40]!r}"
        )


def check_batch(snapshot: Snapshot, config: ResolvedConfig, num_samples: int | None = None) -> None:
    """CheckpointError unless the batch of the state is one that a run of this config can have.

    num_samples: of an epoch, where that is known.
    """
    least, most = batches(config, num_samples)
    found = snapshot.state["standing"]["batch"]
    if not least <= found <= most:
        expected = (
            f"{least}, as in the config" if least == most else f"{least} to {most}, by the config"
        )
        raise CheckpointError(f"state.json: standing.batch: expected {expected}, found {found}")


def check_optimizer(snapshot: Snapshot, config: ResolvedConfig) -> None:
    """CheckpointError unless the settings in the state are of the kinds that the config's optimizer
    has.

    Whether they belong to this model's parameters is known when the model is built.
    """
    found = snapshot.state["optimizer"]
    names, numbers = [], []
    usual = {**make_optimizer(config, nn.Linear(1, 1)).defaults, "rate_factor": 1.0}
    for index, group in enumerate(found["groups"]):
        names += _listed(group, "param_names", str, index)
        numbers += _listed(group, "params", int, index)
        for key, value in group.items():
            if key in usual and not is_like(value, usual[key]):
                raise CheckpointError(
                    f"state.json: optimizer.groups.{index}.{key}: expected something like"
                    f" {usual[key]!r}, found {str(value)[:40]!r}"
                )
    if names != found["names"] or numbers != list(range(len(names))):
        raise CheckpointError(
            "state.json: optimizer.groups: expected each of optimizer.names once, in their order"
        )


def _listed(group: Mapping[str, Any], key: str, kind: type, index: int) -> list[Any]:
    values = group.get(key)
    if not isinstance(values, list) or any(type(each) is not kind for each in values):
        raise CheckpointError(
            f"state.json: optimizer.groups.{index}.{key}: expected a list of {kind.__name__}, found"
            f" {str(values)[:40]!r}"
        )
    return values


def check_used(snapshot: Snapshot) -> None:
    """CheckpointError unless images can be shown to the model, as far as types and ranges show."""
    images = _checked(_Used, snapshot).pictures
    channels = images.shape[0]
    for name, values in (("mean", images.mean), ("std", images.std)):
        if name == "std" and not all(0 < value < MAX_VALUE for value in values):
            raise CheckpointError(
                f"state.json: pictures.std: expected numbers above 0, found {str(values)[:40]}"
            )
        if len(values) != channels:
            raise CheckpointError(
                f"state.json: pictures.{name}: expected {channels} numbers, found {len(values)}"
            )
    for shape in (images.shape, images.trained_shape or images.shape):
        if prod(shape) > _MOST_VALUES:
            raise CheckpointError(
                f"state.json: pictures.shape: {shape} is more than {_MOST_VALUES:,} values"
            )


def _checked(kind: Any, snapshot: Snapshot) -> Any:
    if not isinstance(snapshot.state, Mapping):
        raise CheckpointError(
            f"state.json: expected keys and values, found {type(snapshot.state).__name__}"
        )
    try:
        state = kind.model_validate(snapshot.state)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        found = "" if first["type"] == "missing" else f", found {str(first['input'])[:40]!r}"
        raise CheckpointError(f"state.json: {place}: {first['msg']}{found}") from None
    if state.standing.samples != snapshot.samples:
        raise CheckpointError(
            f"state.json: standing.samples: expected {snapshot.samples}, as the folder's name has"
            f" it, found {state.standing.samples}"
        )
    return state
