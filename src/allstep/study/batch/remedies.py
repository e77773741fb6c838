"""Known remedies for the accuracy that a large batch loses, as overrides of `allstep train`.

An override is a key=value argument. Values that depend on the batch are in braces: `warmup` is the
epochs of warm-up; `linear` and `root` are the fractions of the peak learning rate at which the
warm-up starts, so that it starts with the learning rate of the small batch.

| Remedy | Learning rate (lr) and further changes |
|---|---|
| plain | no remedy: lr of the small batch, no warm-up |
| linear | lr proportional to the batch (Krizhevsky 2014; Goyal et al. 2017) |
| warmup | linear, with a warm-up over the first epochs (Goyal et al. 2017) |
| root | lr by square root of the batch, warm-up (Krizhevsky 2014; Hoffer et al. 2017) |
| ghost | root, and batch norm over 32 samples at a time (Hoffer et al. 2017) |
| longer | warmup, and epochs for as many updates as the small batch has (Hoffer et al. 2017) |
| lars | layer-wise lr (You et al. 2017), square-root rule, warm-up |
| larc | layer-wise lr, clipped at the global lr; linear rule, warm-up |
| lamb | layer-wise lr on Adam (You et al. 2019), square-root rule, warm-up |
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from allstep.errors import ConfigError, did_you_mean

Overrides = tuple[str, ...]

_NO_WARM_UP: Overrides = ("schedule.warmup=0", "schedule.warmup_kind=none")
_LINEAR: Overrides = ("optimizer.scaling=linear",)
_RISING: Overrides = (
    "schedule.warmup={warmup}",
    "schedule.warmup_kind=gradual",
    "schedule.warmup_from={linear}",
)
_ROOT: Overrides = (
    "optimizer.scaling=square-root",
    "schedule.warmup={warmup}",
    "schedule.warmup_kind=gradual",
    "schedule.warmup_from={root}",
)

_RULES = {"optimizer.scaling=none", *_NO_WARM_UP, *_LINEAR, *_RISING, *_ROOT}
"""Overrides that only change how the learning rate follows the batch."""

REMEDIES: Mapping[str, Overrides] = {
    "plain": ("optimizer.scaling=none", *_NO_WARM_UP),
    "linear": (*_LINEAR, *_NO_WARM_UP),
    "warmup": (*_LINEAR, *_RISING),
    "root": _ROOT,
    "ghost": (*_ROOT, "model.norm=ghost", "model.ghost=32"),
    "longer": (*_LINEAR, *_RISING, "schedule.keep_updates=true"),
    "lars": ("optimizer.name=lars", "optimizer.trust_coefficient=0.02", "optimizer.lr=0.1", *_ROOT),
    "larc": ("optimizer.name=larc", "optimizer.trust_coefficient=0.02", *_LINEAR, *_RISING),
    "lamb": ("optimizer.name=lamb", "optimizer.lr=0.004", *_ROOT),
}

LONGEST_WARM_UP = 5.0
"""Maximum epochs of warm-up, which is also at most a sixth of the run."""


def overrides_for(remedy: Sequence[str], batch: int, base_batch: int, epochs: int) -> Overrides:
    """Return the overrides of `remedy` for this `batch`, with the values in braces filled in.

    `base_batch` is the batch for which the learning rate was found.
    """
    part = min(1.0, base_batch / batch)
    values = {
        "warmup": f"{min(LONGEST_WARM_UP, epochs / 6):g}",
        "linear": f"{part:.6g}",
        "root": f"{math.sqrt(part):.6g}",
    }
    # nothing to scale and no warm-up needed: these remedies share the run of plain
    if batch == base_batch and set(remedy) <= _RULES:
        return REMEDIES["plain"]
    return tuple(each.format(**values) for each in remedy)


def chosen(names: Iterable[str], own: Iterable[str] = ()) -> dict[str, Overrides]:
    """Return the remedies with these `names`, and all of `own`, as overrides by name.

    An entry of `own` is "name:key=value,key=value"; the name of a known remedy in this list is
    replaced by its overrides.
    """
    mine = dict(_own(text) for text in own)
    known = {**REMEDIES, **mine}
    names = list(dict.fromkeys([*names, *mine]))
    if not names:
        raise ConfigError(f"--remedies: expected some of {', '.join(known)}, found nothing")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--remedies: no remedy is called {name!r}; {did_you_mean(name, known)}"
            )
    return {name: known[name] for name in names}


def _own(text: str) -> tuple[str, Overrides]:
    name, _, rest = text.partition(":")
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    overrides = tuple(each for part in parts for each in REMEDIES.get(part, (part,)))
    good_name = name.replace("-", "").replace(".", "").isalnum()
    if not good_name or not overrides or any("=" not in each for each in overrides):
        raise ConfigError(
            f"--remedy {text!r}: expected name:key=value,key=value, or name:lars,key=value for"
            " another form of lars; a name has letters, digits, - and ."
        )
    if name in REMEDIES:
        raise ConfigError(
            f"--remedy {text!r}: {name} is a known remedy; give yours another name, such as"
            f" {name}-2"
        )
    try:
        overrides_for(overrides, 1, 1, 1)
    except (KeyError, ValueError, IndexError):
        raise ConfigError(
            f"--remedy {text!r}: expected only warmup, linear or root in braces"
        ) from None
    return name, overrides
