"""What a rank leaves in the group's store at its end: why the group failed, or that it just left.

```
word/<rank>      a `Failure`; its kind is "left" when nothing went wrong
```

The first failure of a process is also left for the launcher, at a place of its own in its store
(`wire.keys.failure_of`): by it the launcher tells the cause from its consequences.

The store may be on a host that is gone: no call waits longer than two seconds for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from allstep.comm.health.failure import Failure, from_json
from allstep.comm.health.threads import watch
from allstep.comm.join.store import WireStore, root_of
from allstep.wire.keys import failure_of

STORE_SECONDS = 2.0


class FailureRecords:
    """The words of one group. store: of this group alone. name: our rank as the user counts it."""

    def __init__(self, store: Store, rank: int, name: int) -> None:
        self._store, self._rank, self._name = store, rank, name
        self._seconds = STORE_SECONDS

    def write(self, record: Failure) -> None:
        """Leave our word. May hang, since the store may."""
        self._store.set(f"word/{self._rank}", record.to_json())

    def record(self, record: Failure) -> None:
        """Leave a failure for the launcher. May hang, since the store may.

        The first one of a process counts: what fails later fails because of it.
        """
        store = root_of(self._store)
        if isinstance(store, WireStore):
            store.compare_set(failure_of(self._name), "", record.to_json())

    def leave(self, record: Failure) -> None:
        """Leave why the group failed, also for the launcher, if the store answers in time."""

        def write_and_record() -> None:
            self.write(record)
            self.record(record)

        self.at_store(write_and_record)

    def of(self, ranks: Sequence[int]) -> dict[int, Failure]:
        """The words that these ranks have left, by rank; none when the store cannot be reached."""
        return (self.at_store(lambda: self._read(ranks)) or {}) if ranks else {}

    def _read(self, ranks: Sequence[int]) -> dict[int, Failure]:
        found = [rank for rank in ranks if self._store.check([f"word/{rank}"])]
        return {rank: from_json(self._store.get(f"word/{rank}").decode()) for rank in found}

    def at_store(self, act: Callable[[], Any]) -> Any:
        """None when the store cannot be reached: then each side takes the other for dead."""
        try:
            return watch().send(act, self._seconds)
        except TimeoutError:
            self._seconds = 0.1  # it will not be back in time
        except Exception:
            return None
