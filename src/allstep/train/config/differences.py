"""The keys in which configs differ: a recipe from the defaults, a run from its recipe.

The start banner shows both, and a resumed run uses the comparison.

    recipe     digits sets epochs=150 batch=64 model.name=small-cnn ...
    changed    optimizer.lr=0.2

Both lines are `key=value` overrides that the command line accepts.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from allstep.train.config.recipes import BASES
from allstep.train.config.run_config import NEUTRAL, RunConfig

Difference = tuple[str, Any, Any]
"""A key with the value before and the value now."""

_SHOWN_ELSEWHERE = (
    *("recipe", "device", "precision", "execution", "share_weights", "shares"),
    *("data.name", "data.folder", "data.train", "data.workers"),
)
"""Keys that other lines of the banner show; most of them depend on the machine."""


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[Difference]:
    """Yield the keys in which two configs differ, with the values before and now.

    The configs are plain values. A key in a section has a dot: "optimizer.lr".
    """
    for key in dict.fromkeys([*before, *now]):
        name, was, is_now = f"{prefix}{key}", before.get(key), now.get(key)
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            yield from differences(was, is_now, f"{name}.")
        elif was != is_now:
            yield name, was, is_now


def set_by_recipe(recipe: str) -> list[str]:
    """Return the keys in which a recipe differs from the defaults, as key=value."""
    return _as_overrides(_between(BASES[NEUTRAL](), BASES[recipe]()))


def set_by_user(config: RunConfig) -> list[str]:
    """Return the keys in which a run differs from its recipe or the defaults, as key=value."""
    usual = _filled_in(config)
    found = _between(BASES[config.recipe](), config)
    return _as_overrides(each for each in found if each not in usual)


def _between(before: RunConfig, now: RunConfig) -> Iterator[Difference]:
    found = differences(before.model_dump(mode="json"), now.model_dump(mode="json"))
    return (each for each in found if each[0] not in _SHOWN_ELSEWHERE)


def _filled_in(config: RunConfig) -> list[Difference]:
    """Return the keys that `resolved` and `usual_batch` fill in: None before, a value now."""
    schedule = config.schedule.model_copy(update={"warmup": None})
    optimizer = config.optimizer.model_copy(update={"betas": None, "trust_coefficient": None})
    blank = config.model_copy(update={"batch": None, "schedule": schedule, "optimizer": optimizer})
    filled = blank.model_copy(update={"batch": config.batch}).resolved(1)
    return list(differences(blank.model_dump(mode="json"), filled.model_dump(mode="json")))


def _as_overrides(found: Iterator[Difference]) -> list[str]:
    return [shlex.quote(f"{key}={_text(value)}") for key, _, value in found]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return json.dumps(value, separators=(",", ":"))
