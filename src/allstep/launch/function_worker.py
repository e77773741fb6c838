"""The program of a worker of `allstep.run`: fetches the call, makes it, stores the result.

It ends when the process that called `allstep.run` ends.
"""

import os
import signal
import sys
import threading

from allstep import wire
from allstep.launch.large_values import chunks, collect
from allstep.wire.keys import TICKET

_HOUR = 3600.0
# The caller's store exists before any worker starts: if it does not answer, the caller has ended.
_CALLER_SECONDS = 10.0


def main() -> None:
    """Make the call that the caller's store holds, and store its result."""
    # cloudpickle has no type stubs.
    import cloudpickle  # type: ignore[import-untyped]

    ((host, _), *_) = wire.parse_addresses(os.environ["ALLSTEP_STORE"])
    caller = wire.Client(
        [(host, int(os.environ.pop("ALLSTEP_CALL_PORT")))],
        os.environ.pop("ALLSTEP_CALL_TOKEN"),
        _CALLER_SECONDS,
    )
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    data = collect("call", lambda key: caller.get(key, 30.0))
    assert data is not None
    path, call = cloudpickle.loads(data)
    sys.path[:0] = [entry for entry in path if entry not in sys.path]
    func, args, kwargs = cloudpickle.loads(call)
    fixed = _place()
    result = func(*args, **kwargs)
    # In an elastic run the rank is that of the last world.
    rank, size = _place() if TICKET in os.environ else fixed
    caller.set("size", size.encode())
    for key, chunk in chunks(f"result/{rank}", cloudpickle.dumps(result)):
        caller.set(key, chunk)


def _place() -> tuple[str, str]:
    """Return rank and size of this worker."""
    return os.environ["ALLSTEP_RANK"], os.environ["ALLSTEP_SIZE"]


def _end_with(caller: wire.Client) -> None:
    """Kill the process group of this worker when the caller ends.

    The caller never sets the key "end", so only a lost connection ends the wait.
    """
    while True:
        try:
            caller.wait(["end"], _HOUR)
        except wire.KeysLate:
            continue
        except OSError:
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
