"""The modes and faults that a sync study compares, as the user writes them.

```
--modes allreduce,async,stale:2,diloco:32+optimizer.name=adamw,shares=speed
--faults none,slow:3@rank=1,slow:2@rank=1,step=50-90
```

A mode is a value of `sync`, config keys, or both with `+` in between. `allreduce` brings
`shares=speed` with it: the same throughput without staleness when one worker is always slow.
"""

from allstep.errors import ConfigError
from allstep.faults import spec
from allstep.parallel.sync_mode import sync_mode

BY_SPEED = "shares=speed"
SYNCHRONOUS = "allreduce"
NO_FAULT = "none"


def parse_modes(text: str) -> list[str]:
    """Return the modes of a list, each once; ConfigError for one that does not exist."""
    modes = list(dict.fromkeys(_mode(part.strip()) for part in text.split(",") if part.strip()))
    if not modes:
        raise ConfigError("--modes: expected modes such as allreduce,async,stale:2, found nothing")
    if SYNCHRONOUS in modes and BY_SPEED not in modes:
        modes.insert(modes.index(SYNCHRONOUS) + 1, BY_SPEED)
    return modes


def _mode(text: str) -> str:
    """Return a mode in its usual form."""
    name, *keys = text.split("+")
    if "=" in name:
        keys, name = [name, *keys], ""
    wrong = [key for key in keys if not key.partition("=")[2]]
    if wrong:
        raise ConfigError(
            f"--modes {text}: expected key=value after +, such as async+sync.correct=lr, found"
            f" {wrong[0]!r}"
        )
    try:
        first = [str(sync_mode(name))] if name else []
    except ConfigError as error:
        raise ConfigError(f"--modes: {error}") from error
    return "+".join([*first, *keys])


def overrides_of(mode: str) -> tuple[str, ...]:
    """Return the config keys that set a mode."""
    return tuple(part if "=" in part else f"sync={part}" for part in mode.split("+"))


def parse_faults(text: str) -> list[str]:
    """Return the faults of a list, each as the value of --fault; "none" is a run without one.

    A comma also separates the places of a fault: a part such as step=50 belongs to the fault before
    it.
    """
    faults: list[str] = []
    for part in (each.strip() for each in text.split(",")):
        if faults and _is_place(part) and "@" in faults[-1]:
            faults[-1] += f",{part}"
        elif part:
            faults.append(part)
    for fault in faults:
        if fault != NO_FAULT:
            try:
                spec.parse_all(fault)
            except ConfigError as error:
                raise ConfigError(f"--faults: {error}") from error
    if not faults:
        raise ConfigError("--faults: expected none or faults such as slow:3@rank=1, found nothing")
    return list(dict.fromkeys(faults))


def _is_place(text: str) -> bool:
    return "=" in text and "@" not in text


def fault_options(fault: str) -> tuple[str, ...]:
    """Return the options of `allstep train` for a fault."""
    return () if fault == NO_FAULT else ("--fault", fault)
