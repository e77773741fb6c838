"""Check that connections without the token neither slow down ranks of the store nor keep them out.

    python benchmarks/store_strangers.py

The store runs in this process with at most 50 file descriptors. Another process holds 80 silent
connections. The output is the time of a joined rank's request without and with them (median and
maximum of 200), their ratio, and the time that a new rank needs to join.
"""

import resource
import statistics
import subprocess
import sys
import time

from allstep.wire import Client, Server, new_token

_MAX_FILES = 50
# A separate process: this one has no file descriptors left after the silent connections.
_HOLDER = """
import socket, sys, time
from allstep.wire import Client
port, token = int(sys.argv[1]), sys.argv[2]
held = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
print("held", flush=True)
sys.stdin.readline()
started = time.monotonic()
try:
    Client([("127.0.0.1", port)], token, timeout=20.0).close()
    print(f"joined after {time.monotonic() - started:.3f} s", flush=True)
except OSError as error:
    print(f"was refused after {time.monotonic() - started:.3f} s: {error}", flush=True)
"""


def request_times(client: Client, number: int = 200, seconds: float = 10.0) -> list[float]:
    """Return the seconds of up to `number` requests, which take about `seconds` at most."""
    times: list[float] = []
    while len(times) < number and sum(times) < seconds:
        started = time.perf_counter()
        client.set("k", b"v")
        times.append(time.perf_counter() - started)
    return times


def row(name: str, times: list[float]) -> str:
    return (
        f"{name:22} {1e3 * statistics.median(times):9.3f} ms median {1e3 * max(times):9.3f} ms"
        " maximum"
    )


def main() -> None:
    token = new_token()
    with Server(token) as server:
        client = Client([("127.0.0.1", server.port)], token)
        alone = request_times(client)
        command = [sys.executable, "-c", _HOLDER, str(server.port), token]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FILES, hard))
        assert holder.stdout is not None
        holder.stdout.readline()
        crowded = request_times(client)
        joining, _ = holder.communicate("join\n")
        client.close()
    print(row("no strangers", alone))
    print(row("80 silent strangers", crowded))
    print(
        f"ratio of the medians {statistics.median(crowded) / statistics.median(alone):.2f}; a new"
        f" rank {joining}",
        end="",
    )


if __name__ == "__main__":
    main()
