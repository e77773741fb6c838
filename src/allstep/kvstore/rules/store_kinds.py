"""The names of stores, MXNet's among them, and what each means.

========  =========================================  ===========================================
mode      names                                      the value after a push
========  =========================================  ===========================================
local     local, device, nccl, ...                   of this process alone
sync      dist, dist_sync, dist_device_sync, ...     changes once all workers have pushed
async     dist_async, dist_async_device              changes at each push
stale     dist_stale:S                               as async; a push waits if another worker's
                                                     gradient would become older than S rounds
========  =========================================  ===========================================

`device` and `nccl` state in MXNet where sums are computed. Here a sum is computed where its values
are, so these names change nothing. `horovod` and `byteps` are MXNet's names for stores without an
optimizer: they sum.
"""

from dataclasses import dataclass

from allstep.errors import UserError, did_you_mean

_SUMS_ONLY = ("horovod", "byteps")
_STALE = "dist_stale"
_MODES = {
    **dict.fromkeys(("local", "device", "nccl"), "local"),
    **dict.fromkeys(("local_update_cpu", "local_allreduce_cpu", "local_allreduce_device"), "local"),
    **dict.fromkeys(("dist", "dist_sync", "dist_device_sync", "dist_sync_device"), "sync"),
    **dict.fromkeys(_SUMS_ONLY, "sync"),
    **dict.fromkeys(("dist_async", "dist_async_device"), "async"),
}


@dataclass(frozen=True)
class StoreKind:
    """What a store does.

    name: as the user wrote it, in lower case. mode: see the table above. rounds: the S of
    `dist_stale:S`, else 0. has_optimizer: whether `set_optimizer` is available.
    """

    name: str
    mode: str
    rounds: int = 0
    has_optimizer: bool = True


def store_kind(name: str) -> StoreKind:
    """Return what the store of this name does; UserError for an unknown name."""
    if not isinstance(name, str):
        raise UserError(
            f"kvstore.create({name!r}): expected the name of a store, such as 'dist_sync'"
        )
    lower = name.strip().lower()
    stem, colon, rounds = lower.partition(":")
    if stem == _STALE:
        return StoreKind(lower, "stale", _rounds(name, rounds))
    if lower in _MODES:
        return StoreKind(lower, _MODES[lower], has_optimizer=lower not in _SUMS_ONLY)
    if colon and stem in _MODES:
        raise UserError(f"kvstore.create({name!r}): {stem!r} takes no number after a colon")
    known = [*_MODES, f"{_STALE}:4"]
    raise UserError(f"kvstore.create({name!r}): unknown store; {did_you_mean(lower, known)}")


def _rounds(name: str, text: str) -> int:
    """Return the S of `dist_stale:S`."""
    is_number = text.isascii() and text.isdigit()
    if is_number and int(text) == 0:
        raise UserError(
            f"kvstore.create({name!r}): no gradient would ever be old; use 'dist_sync', where all"
            " workers wait for each other"
        )
    if not is_number:
        raise UserError(
            f"kvstore.create({name!r}): expected '{_STALE}:S' with a whole number of rounds S of 1"
            f" or more, such as '{_STALE}:4'"
        )
    return int(text)
