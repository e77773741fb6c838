"""Config keys that were renamed before the first release, with their new names.

A user must type the new name. Run folders of older versions are translated, so that they can be
resumed, evaluated and reported.
"""

import copy
from collections.abc import Mapping
from typing import Any

from allstep.errors import ConfigError

RENAMED = {
    "average.decay": "ema.decay",
    "average.every": "ema.every",
    "data.deviation": "data.std",
    "evaluation.choose": "evaluation.weights",
    "evaluation.mirror": "evaluation.flip",
    "growth.most": "growth.max",
    "layout": "execution",
}
_IN_STATE = {"average": "ema", "layout": "execution", "pictures.deviation": "pictures.std"}


def new_name(key: str) -> str | None:
    """Return the new name of a key; None if it was not renamed."""
    return "ema.decay" if key == "average" else RENAMED.get(key)


def translated(
    config: Mapping[str, Any], names: Mapping[str, str] = RENAMED
) -> tuple[dict[str, Any], list[str]]:
    """Return a config with the new keys, and the list of old keys that it had.

    Raise ConfigError if it has both the old and the new name of a key.
    """
    made, found = copy.deepcopy(dict(config)), []
    for old, new in names.items():
        section, key = _place(made, old)
        if section is None or key not in section:
            continue
        value = section.pop(key)
        target, name = _place(made, new, create=True)
        if target is None or name in target:
            raise ConfigError(
                f"config key {old!r} is called {new!r} now, and both are given: remove {old!r}"
            )
        target[name] = value
        found.append(old)
    if made.get("average") == {}:
        del made["average"]
    return made, found


def with_new_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recorded config with the new keys; unchanged if it has both names of a key."""
    try:
        return translated(config)[0]
    except ConfigError:
        return config


def translated_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint with the new names of its config keys."""
    return translated(state, _IN_STATE)[0]


def _place(
    config: dict[str, Any], key: str, create: bool = False
) -> tuple[dict[str, Any] | None, str]:
    """Return the section that contains a key, or None, and the key's name in that section.

    With `create` a missing section is created.
    """
    name, _, inner = key.partition(".")
    if not inner:
        return config, name
    section = config.setdefault(name, {}) if create else config.get(name)
    return (section if isinstance(section, dict) else None), inner
