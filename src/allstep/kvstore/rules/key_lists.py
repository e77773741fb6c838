"""The arguments of a call: one key or several, and for each key one value or several.

========================  =========================  =====================
keys                      values                     means
========================  =========================  =====================
3                         a                          {3: [a]}
3                         [a, b]                     {3: [a, b]}
[3, 5]                    [a, b]                     {3: [a], 5: [b]}
[3, 5]                    [[a, b], [c]]              {3: [a, b], 5: [c]}
[3, 5, 3]                 [a, b, c]                  {3: [a, c], 5: [b]}
========================  =========================  =====================

The several values of a key are those of one worker's devices, as in MXNet: a push sums them, and
all of them receive what a pull returns.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from allstep.errors import UserError

Key = int | str


def values_by_key(call: str, keys: Any, values: Any) -> dict[Key, list[Any]]:
    """Return the values of each key, in the order of the call. `call`: its name, for errors."""
    if not isinstance(keys, list | tuple):
        return {checked(call, keys): _listed(values)}
    if not isinstance(values, list | tuple):
        raise UserError(
            f"{call}: {len(keys)} keys and one value; expected a list with a value for each key"
        )
    if len(keys) != len(values):
        raise UserError(
            f"{call}: {len(keys)} keys and {len(values)} values; expected a value for each key"
        )
    found: dict[Key, list[Any]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(checked(call, key), []).extend(_listed(value))
    return found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def checked(call: str, key: Any) -> Key:
    """Return a key that is an int or a str; UserError for any other."""
    if type(key) is not int and type(key) is not str:
        raise UserError(f"{call}: key {key!r} has type {type(key).__name__}; expected int or str")
    return key


def check_kinds(call: str, keys: Iterable[Key], present: Iterable[Key]) -> None:
    """Raise UserError if int and str keys are mixed, among `keys` or with those `present`."""
    first: Key | None = next(iter(present), None)
    for key in keys:
        first = key if first is None else first
        if type(key) is not type(first):
            raise UserError(
                f"{call}: key {key!r} has type {type(key).__name__}, but key {first!r} of this"
                f" store has type {type(first).__name__}; use one type of key in a store"
            )


def check_new(call: str, keys: Any, present: Iterable[Key]) -> None:
    """Raise UserError if a key is initialized already, or twice in this call."""
    given: Sequence[Key] = keys if isinstance(keys, list | tuple) else [keys]
    seen = set(present)
    for key in given:
        if key in seen:
            raise UserError(
                f"{call}: duplicate init of key {key!r}; each key is initialized once, use push to"
                " change its value"
            )
        seen.add(key)
