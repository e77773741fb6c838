"""Reports of faults that occur: a line, a record in the launcher's store, and listeners.

The victim reports before it acts, since it may not live longer. A record is

```
allstep/faults        number of records (a counter)
allstep/fault/<n>     JSON: `fault` (as the user wrote it), `rank`, `text`; n from 1
```

The faults of a worker's own command line are in `allstep/faults/given`, a list as JSON: the
launcher names at the end of the run which of them did not occur.

The launcher reads them when a rank or the run ends, rank 0 of `allstep train` during the run. A
process without the launcher's store prints the line and calls its own listeners.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from allstep import wire
from allstep.console.escape import print_notice
from allstep.process.thread_call import call_within
from allstep.wire import keys

# The store may be on a host that is lost; the fault must occur anyway.
_STORE_SECONDS = 2.0
# Between two looks into the store for the faults of other ranks.
_POLL_SECONDS = 0.2


class Occurred(NamedTuple):
    """A fault that occurs now. fault: the text of the user. text: which rank does what, where."""

    fault: str
    rank: int
    text: str

    def __str__(self) -> str:
        return f"fault {self.fault}: {self.text}"

    def to_json(self) -> bytes:
        """Return the record of it."""
        return json.dumps(self._asdict()).encode()


def from_json(record: bytes | None) -> Occurred | None:
    """Return what `to_json` wrote; None for anything else."""
    try:
        found = json.loads(record or b"null")
        occurred = Occurred(**found)
    # RecursionError: thousands of opening brackets.
    except (ValueError, TypeError, RecursionError):
        return None
    is_valid = isinstance(occurred.fault, str) and type(occurred.rank) is int
    return occurred if is_valid and isinstance(occurred.text, str) else None


Listener = Callable[[Occurred], None]


class Reports:
    """The reports of this process, and those of other ranks for its listeners."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.occurred: set[str] = set()
        """Faults that occurred in this process, as the user wrote them."""
        self._listeners: list[Listener] = []
        self._client: wire.Client | None = None
        self._num_read, self._polled_at = 0, 0.0
        # Numbers of the records of this process. A rank does not identify it: in an elastic run it
        # may have been that of a worker that is dead.
        self._own: set[int] = set()
        self._lock = threading.Lock()

    def send(self, occurred: Occurred) -> None:
        """Report a fault of this process: line, record, listeners."""
        self.occurred.add(occurred.fault)
        print_notice(str(occurred))
        with contextlib.suppress(OSError):
            call_within(lambda: self._record(occurred), _STORE_SECONDS, "allstep-fault")
        for listener in tuple(self._listeners):
            listener(occurred)

    def announce(self, given: Sequence[str]) -> None:
        """Let the launcher know faults that are not in its environment."""
        if given:
            with contextlib.suppress(OSError):
                call_within(lambda: self._announce(given), _STORE_SECONDS, "allstep-faults-given")

    def _announce(self, given: Sequence[str]) -> None:
        client = self._store()
        if client is not None:
            client.set(keys.FAULTS_GIVEN, json.dumps(list(given)).encode())
            client.close()

    def listen(self, listener: Listener) -> None:
        """Call `listener` for each fault of this process, and in `poll` for those of others."""
        self._listeners.append(listener)

    def poll(self, *, now: bool = False) -> None:
        """Pass the faults of other ranks on to the listeners; looks only sometimes, or `now`."""
        if not self._listeners or (not now and time.monotonic() < self._polled_at + _POLL_SECONDS):
            return
        self._polled_at = time.monotonic()
        for number, occurred in self._recorded(from_number=self._num_read + 1):
            if number not in self._own:
                for listener in tuple(self._listeners):
                    listener(occurred)

    def _recorded(self, from_number: int) -> list[tuple[int, Occurred]]:
        """Return the numbers and the faults of the records from a number on."""
        with contextlib.suppress(OSError):
            return call_within(
                lambda: self._read(from_number), _STORE_SECONDS, "allstep-fault-records"
            )
        return []

    def _read(self, number: int) -> list[tuple[int, Occurred]]:
        client, found = self._store(), []
        while client is not None and client.check([keys.fault_record(number)]):
            record = from_json(client.get(keys.fault_record(number), _STORE_SECONDS))
            if record is not None:
                found.append((number, record))
            self._num_read = max(self._num_read, number)
            number += 1
        if client is not None:
            # The connection belongs to this thread, which ends now.
            client.close()
        return found

    def _record(self, occurred: Occurred) -> None:
        client = self._store()
        if client is not None:
            number = client.add(keys.FAULTS, 1)
            self._own.add(number)
            client.set(keys.fault_record(number), occurred.to_json())
            client.close()

    def _store(self) -> wire.Client | None:
        """Return the client of the launcher's store; None without one."""
        address, token = os.environ.get("ALLSTEP_STORE"), os.environ.get("ALLSTEP_TOKEN")
        if not address or not token:
            return None
        with self._lock:
            if self._client is None:
                addresses = wire.parse_addresses(address)
                ticket = os.environ.get(keys.TICKET, "")
                self._client = wire.Client(addresses, token, _STORE_SECONDS, ticket)
            return self._client
