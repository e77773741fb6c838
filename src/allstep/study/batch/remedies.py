"""The known remedies against what a large batch costs, each as the words that `allstep train`
takes.

In braces stands what depends on the batch: `warmup` epochs, and the `linear` and `root` part of the
peak from which the rate rises, so that a warm-up begins with the rate of the small batch.

| Remedy | |
|---|---|
| plain | none: the small batch's rate, no warm-up |
| linear | the rate in proportion to the batch (Krizhevsky 2014; Goyal et al. 2017) |
| warmup | and rising to it over the first epochs (Goyal et al. 2017) |
| root | the rate by the square root of the batch, with warm-up (Krizhevsky 2014; Hoffer et al. 2017) |
| ghost | root, and batch norm over 32 samples at a time (Hoffer et al. 2017) |
| longer | warmup, and as many updates as the small batch has (regime adaptation, Hoffer et al. 2017): more epochs |
| lars | layer-wise rates (You et al. 2017), square-root rule, warm-up |
| larc | the same, clipped at the rate |
| lamb | layer-wise rates on Adam (You et al. 2019), square-root rule, warm-up |
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from allstep.errors import ConfigError, did_you_mean

Words = tuple[str, ...]

_NO_WARM_UP: Words = ("schedule.warmup=0", "schedule.warmup_kind=none")
_LINEAR: Words = ("optimizer.scaling=linear",)
_RISING: Words = (
    "schedule.warmup={warmup}",
    "schedule.warmup_kind=gradual",
    "schedule.warmup_from={linear}",
)
_ROOT: Words = (
    "optimizer.scaling=square-root",
    "schedule.warmup={warmup}",
    "schedule.warmup_kind=gradual",
    "schedule.warmup_from={root}",
)

_RULES = {"optimizer.scaling=none", *_NO_WARM_UP, *_LINEAR, *_RISING, *_ROOT}
"""What says no more than how the rate follows the batch."""

REMEDIES: Mapping[str, Words] = {
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
"""Epochs; and at most a sixth of the run."""


def words_for(remedy: Sequence[str], batch: int, base_batch: int, epochs: int) -> Words:
    """What to say for this batch."""
    part = min(1.0, base_batch / batch)
    values = {
        "warmup": f"{min(LONGEST_WARM_UP, epochs / 6):g}",
        "linear": f"{part:.6g}",
        "root": f"{math.sqrt(part):.6g}",
    }
    if (
        batch == base_batch and set(remedy) <= _RULES
    ):  # nothing to scale, nowhere to rise to: one run for all of them
        return REMEDIES["plain"]
    return tuple(word.format(**values) for word in remedy)


def chosen(names: Iterable[str], own: Iterable[str] = ()) -> dict[str, Words]:
    """The remedies of these names, and all of `own`: "name:key=value,key=value", where the name of
    a known one stands for its words."""
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


def _own(text: str) -> tuple[str, Words]:
    name, _, rest = text.partition(":")
    parts = [word.strip() for word in rest.split(",") if word.strip()]
    said = tuple(word for part in parts for word in REMEDIES.get(part, (part,)))
    if (
        not name.replace("-", "").replace(".", "").isalnum()
        or not said
        or any("=" not in word for word in said)
    ):
        raise ConfigError(
            f"--remedy {text!r}: expected name:key=value,key=value, or name:lars,key=value for"
            " another form of lars; the name of letters, digits, - and ."
        )
    if name in REMEDIES:
        raise ConfigError(
            f"--remedy {text!r}: {name} is a known remedy; give yours another name, such as"
            f" {name}-2"
        )
    try:
        words_for(said, 1, 1, 1)
    except (KeyError, ValueError, IndexError):
        raise ConfigError(
            f"--remedy {text!r}: in braces may stand warmup, linear and root"
        ) from None
    return name, said
