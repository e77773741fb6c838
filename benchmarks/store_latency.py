"""Compare the latency of the store in several versions: protection may cost a request at most 5%.

    git worktree add /tmp/before 4f65a92~1
    python benchmarks/store_latency.py /tmp/before/src src
    python benchmarks/store_latency.py src src+signed src+ticket

`+signed`: the frames are signed, as between hosts. `+ticket`: the client has a ticket, as in an
elastic run.
A store runs in one process, and a client in another sends it 3,000 requests per turn. The
versions take turns in alternating order. The output is the median time of a request of each
version, and the ratio to the first version of the same round: its median and range.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

_SERVER = """
import sys
from allstep import wire
token, options = wire.new_token(), {}
if sys.argv[1] == "ticket":
    options["tickets"] = wire.Tickets()
ticket = options["tickets"].issue("0") if options else ""
with wire.Server(token, **options) as server:
    print(server.port, token, ticket, flush=True)
    sys.stdin.read()
"""
_CLIENT = """
import statistics, sys, time
from allstep.wire import Client, client as module
if sys.argv[1] == "signed":
    module.is_loopback = lambda _: False
client = Client([("127.0.0.1", int(sys.argv[2]))], *sys.argv[3:4], 30.0, *sys.argv[4:])
times = []
for number in range(3300):
    started = time.perf_counter()
    client.set("key", b"value")
    times.append(time.perf_counter() - started)
client.close()
print(statistics.median(times[300:]))
"""


def turn(source: str) -> float:
    """Return the median seconds of a request, with the package of `source` on both sides."""
    folder, _, variant = source.partition("+")
    env = {**os.environ, "PYTHONPATH": str(Path(folder).resolve())}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, variant], env=env, stdin=pipe, stdout=pipe, text=True
    ) as server:
        assert server.stdout is not None
        given = server.stdout.readline().split()
        client = subprocess.run(
            [sys.executable, "-c", _CLIENT, variant, *given],
            env=env,
            stdout=pipe,
            text=True,
            check=True,
            timeout=60,
        )
        server.communicate("")
    return float(client.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Latency of the store's requests, version against version."
    )
    parser.add_argument(
        "sources", nargs="+", help="folders with the package allstep, each with +signed or +ticket"
    )
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    sources: list[str] = arguments.sources
    seconds: dict[str, list[float]] = {source: [] for source in sources}
    for number in range(arguments.turns):
        for source in sources if number % 2 else sources[::-1]:
            seconds[source].append(turn(source))
    for source in sources:
        ratios = [
            own / first for own, first in zip(seconds[source], seconds[sources[0]], strict=True)
        ]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{source}: {1e6 * statistics.median(seconds[source]):.1f} us, "
            f"{statistics.median(ratios):.2f} of the first ({spread})"
        )


if __name__ == "__main__":
    main()
