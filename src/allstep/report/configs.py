"""The keys in which a run's config differs from its recipe, or from other runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.train.config.recipes import BASES

_ABSENT = "–"


@dataclass(frozen=True)
class Row:
    """A config key with its value in the recipe and in each run."""

    key: str
    recipe: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether a value differs from the recipe's, or between runs."""
        return len({*self.values, self.recipe} - {_ABSENT}) > 1 or len(set(self.values)) > 1


def rows(configs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for every key of any config, in the order of the configs."""
    flat = [flattened(config) for config in configs]
    recipe = _recipe(flat)
    keys = dict.fromkeys(key for each in flat for key in each)
    return [
        Row(key, recipe.get(key, _ABSENT), tuple(each.get(key, _ABSENT) for each in flat))
        for key in keys
    ]


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of the config as text, by keys such as `section.key`."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _text(value)
    return found


def _recipe(flat: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the recipe (or the defaults) that all runs name, as in this version of allstep.

    The result is empty if they name several or none.
    """
    names = {each.get("recipe") for each in flat}
    make = BASES.get(str(next(iter(names)))) if len(names) == 1 else None
    return flattened(make().model_dump(mode="json")) if make else {}


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    return _decimal(value) if isinstance(value, float) else str(value)


def _decimal(value: float) -> str:
    """Return a text such as 2, 0.1 or 1e+09, with all digits if six are too few."""
    short = f"{value:g}"
    return short if float(short) == value else str(value)
