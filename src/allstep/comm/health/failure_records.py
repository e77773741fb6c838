"""Failure records: what a rank writes to the store when its group fails, or when it leaves.

```
word/<rank>      a `Failure` in the group's part of the store; kind "left" if nothing went wrong
```

The first failure of a process is also recorded for the launcher, under a key of its own in the
launcher's store (`wire.keys.failure_of`): with it the launcher distinguishes the cause from its
consequences.

The store may be on a host that is lost: no call waits longer than two seconds for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from allstep.comm.health.failure import Failure, from_json
from allstep.comm.health.threads import watch
from allstep.comm.join.launcher_store import WireStore, root_of
from allstep.wire.keys import failure_of

STORE_SECONDS = 2.0


class FailureRecords:
    """The failure records of one group.

    `store` is the part of the store that belongs to this group alone. `name` is our rank as the
    user counts it.
    """

    def __init__(self, store: Store, rank: int, name: int) -> None:
        self._store, self._rank, self._name = store, rank, name
        self._seconds = STORE_SECONDS

    def write(self, record: Failure) -> None:
        """Write our record for the other ranks. May block as long as the store does."""
        self._store.set(f"word/{self._rank}", record.to_json())

    def record(self, record: Failure) -> None:
        """Write a failure for the launcher. May block as long as the store does.

        Only the first failure of a process is kept: later ones are its consequences.
        """
        store = root_of(self._store)
        if isinstance(store, WireStore):
            store.compare_set(failure_of(self._name), "", record.to_json())

    def leave(self, record: Failure) -> None:
        """Write why the group failed, for ranks and launcher, if the store answers in time."""

        def write_and_record() -> None:
            self.write(record)
            self.record(record)

        self.at_store(write_and_record)

    def of(self, ranks: Sequence[int]) -> dict[int, Failure]:
        """Return the records of these ranks, by rank; none if the store cannot be reached."""
        return (self.at_store(lambda: self._read(ranks)) or {}) if ranks else {}

    def _read(self, ranks: Sequence[int]) -> dict[int, Failure]:
        found = [rank for rank in ranks if self._store.check([f"word/{rank}"])]
        return {rank: from_json(self._store.get(f"word/{rank}").decode()) for rank in found}

    def at_store(self, act: Callable[[], Any]) -> Any:
        """Return what `act` returns; None if the store does not answer in time.

        Without a store, each side takes the other for lost.
        """
        try:
            return watch().send(act, self._seconds)
        except TimeoutError:
            # A store that did not answer once is not waited for again.
            self._seconds = 0.1
        except Exception:
            return None
