"""Validation of `state.json` of a checkpoint, before anything is built from it.

A checkpoint whose checksums are right may still be of another version, from another user, or made
by hand. A value of the wrong type would end a resumed run with a traceback far from the file. Here
it marks the checkpoint as damaged, and the next older one is used.

`check_resumed` is for a run that resumes, `check_used` for `predict` and `eval`, which need less.
Both are passed to `checkpoint.newest`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from math import prod
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from torch import nn

from allstep.errors import CheckpointError, ConfigError
from allstep.optim import RunningNoiseScale
from allstep.train.checkpoint.optimizer_state import MAX_VALUE, is_like
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.health.divergence import LossWatch
from allstep.train.step.batch_growth import batches
from allstep.train.step.build import make_optimizer
from allstep.train.step.execution import MODES

_Whole = Annotated[int, Field(ge=0, lt=1 << 60)]
_Count = Annotated[int, Field(ge=1, lt=1 << 60)]
_Side = Annotated[int, Field(ge=1, le=1 << 16)]
_Shape = Annotated[list[_Side], Field(min_length=3, max_length=3)]
_Precision = Literal["float32", "bfloat16", "float16", "float64"]
# Loss, weight and count of a tally, then the sums of its task; how many these are is checked when
# the task is known.
_Sums = Annotated[list[float], Field(min_length=3, max_length=1 << 10)]
_MAX_VALUES = 1 << 26
"""Values of one image (8,192 x 8,192 in one channel).

Its memory is allocated before other errors are found.
"""


class _State(BaseModel):
    """Base of the sections of the state: strict types, unknown keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


def _like(kind: type[Any]) -> Any:
    """Return a pydantic model with exactly the fields of a dataclass.

    The dataclass is later made by `kind(**plain)`, which fails for unknown fields.
    """
    hints = get_type_hints(kind)
    made: dict[str, Any] = {
        each.name: (hints[each.name], ... if each.default is MISSING else each.default)
        for each in fields(kind)
    }
    strict = ConfigDict(strict=True, extra="forbid")
    return create_model(kind.__name__, __config__=strict, **made)


_LossWatch: Any = _like(LossWatch)
_Noise: Any = _like(RunningNoiseScale)


class _Score(_State):
    """Loss, count, and metrics by name."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, float]
    loss: float
    count: _Whole


class _Position(_State):
    """Position of the run and its best score."""

    samples: _Whole
    best: _Score | None
    best_samples: _Whole


class _Progress(_Position):
    """What `train.run.state` stores about the position."""

    updates: _Whole
    batch: _Count
    worse: _Whole
    since: _Sums
    owes: _Whole | None


class _Optimizer(_State):
    """Plain values of the optimizer; see `checkpoint.optimizer_state`."""

    names: list[str]
    values: dict[str, Any]
    groups: list[dict[str, Any]]


class _Loader(_State):
    """Position of the training loader."""

    position: _Whole


class _Scaled(_State):
    """Precision and loss scale."""

    name: _Precision | None = None
    scale: Annotated[float, Field(gt=0)]
    steps_since: _Whole


class _Growth(_State):
    """State of batch growth."""

    times: _Whole
    last: _Whole
    room: _Whole = 0


class _Ema(_State):
    """State of the EMA."""

    updates: _Whole


class _Classes(_State):
    """Names of the classes."""

    classes: Annotated[list[str], Field(min_length=1)]


class _Images(_Classes):
    """What `predict` and `eval` need to know about images."""

    shape: _Shape
    trained_shape: _Shape | None = None
    mean: list[float]
    std: list[float]
    prepare: str


class _Resumed(_State):
    """Keys of the state that a resumed run uses."""

    standing: _Progress
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
    """Keys of the state that `predict` and `eval` use."""

    standing: _Position
    pictures: _Images


def check_resumed(snapshot: Snapshot) -> None:
    """Raise CheckpointError unless types and ranges of the state suit a resumed run."""
    state = _checked(_Resumed, snapshot)
    if state.noise is not None:
        try:
            RunningNoiseScale(**state.noise.model_dump())
        except ConfigError as error:
            raise CheckpointError(f"state.json: noise: {error}") from error
    if state.execution not in MODES:
        raise CheckpointError(
            f"state.json: execution: expected one of {', '.join(MODES)}, found"
            f" {state.execution[:40]!r}"
        )


def check_batch(snapshot: Snapshot, config: ResolvedConfig, num_samples: int | None = None) -> None:
    """Raise CheckpointError unless a run of this config can have the batch of the state.

    `num_samples` is the size of an epoch, if known.
    """
    low, high = batches(config, num_samples)
    found = snapshot.state["standing"]["batch"]
    if not low <= found <= high:
        expected = f"{low}, as in the config" if low == high else f"{low} to {high}, by the config"
        raise CheckpointError(f"state.json: standing.batch: expected {expected}, found {found}")


def check_optimizer(snapshot: Snapshot, config: ResolvedConfig) -> None:
    """Raise CheckpointError unless the optimizer's settings in the state have the right types.

    The types are those of the config's optimizer. Whether they belong to the parameters of this
    model is checked when the model is built.
    """
    found = snapshot.state["optimizer"]
    names, numbers = [], []
    usual = {**make_optimizer(config, nn.Linear(1, 1)).defaults, "rate_factor": 1.0}
    for index, group in enumerate(found["groups"]):
        names += _listed(group, "param_names", str, index)
        numbers += _listed(group, "params", int, index)
        _check_settings(group, usual, index)
    if names != found["names"] or numbers != list(range(len(names))):
        raise CheckpointError(
            "state.json: optimizer.groups: expected each of optimizer.names once, in their order"
        )


def _check_settings(group: Mapping[str, Any], usual: Mapping[str, Any], index: int) -> None:
    """Raise CheckpointError if a setting of a parameter group has another type than `usual`."""
    for key, value in group.items():
        if key in usual and not is_like(value, usual[key]):
            raise CheckpointError(
                f"state.json: optimizer.groups.{index}.{key}: expected something like"
                f" {usual[key]!r}, found {str(value)[:40]!r}"
            )


def _listed(group: Mapping[str, Any], key: str, kind: type, index: int) -> list[Any]:
    """Return `group[key]`; raise CheckpointError unless it is a list of `kind`."""
    values = group.get(key)
    if not isinstance(values, list) or any(type(each) is not kind for each in values):
        raise CheckpointError(
            f"state.json: optimizer.groups.{index}.{key}: expected a list of {kind.__name__}, found"
            f" {str(values)[:40]!r}"
        )
    return values


def check_used(snapshot: Snapshot) -> None:
    """Raise CheckpointError unless types and ranges of the state suit `predict` and `eval`."""
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
        if prod(shape) > _MAX_VALUES:
            raise CheckpointError(
                f"state.json: pictures.shape: {shape} is more than {_MAX_VALUES:,} values"
            )


def _checked(kind: Any, snapshot: Snapshot) -> Any:
    """Return the state as `kind`; raise CheckpointError with the first problem."""
    if not isinstance(snapshot.state, Mapping):
        raise CheckpointError(
            f"state.json: expected keys and values, found {type(snapshot.state).__name__}"
        )
    try:
        state = kind.model_validate(snapshot.state)
    except ValidationError as error:
        raise CheckpointError(f"state.json: {_first_problem(error)}") from None
    if state.standing.samples != snapshot.samples:
        raise CheckpointError(
            f"state.json: standing.samples: expected {snapshot.samples}, as in the folder's"
            f" name, found {state.standing.samples}"
        )
    return state


def _first_problem(error: ValidationError) -> str:
    """Return key, message and value of the first problem."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    found = "" if first["type"] == "missing" else f", found {str(first['input'])[:40]!r}"
    return f"{place}: {first['msg']}{found}"
