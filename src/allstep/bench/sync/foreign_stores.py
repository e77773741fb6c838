"""What runs in each process of `allstep bench sync`, and the peers that need no allstep.

    python -I foreign_stores.py mxnet|zeromq WORKERS SOCKET     start server and workers of a peer

MXNet needs an old numpy, so it has an environment of its own, without allstep and torch. This file
is run by its path there and imports only the standard library, MXNet and pyzmq. Each worker
connects to the bench and exchanges lines of JSON with it::

    worker -> {"rank": 0, "names": ["MXNet pushpull"]}
    bench  -> {"name": "MXNet pushpull", "prepare": 4096}   make a key of that many bytes
    worker -> {"server": 4711}                              pid of the server, or null
    bench  -> {"name": "MXNet pushpull", "measure": 100, "limit": 0.2}     calls and seconds
    worker -> {"seconds": [...], "cpu": 0.01}               of each call; CPU seconds of all
    bench  -> {"check": 400}                                the calls of all workers so far
    worker -> {}                                            or {"error": "..."} if they differ

A process that waits for a line uses no CPU time, so the contender that is timed runs alone.

Every key starts at zero, every gradient is one and the learning rate is a power of two, so after n
pushes by any workers all weights are exactly -n / 1024. Before each call the worker writes
its gradient, untimed, as a backward pass does: MXNet overwrites a pushed gradient in its next pull.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

LR = 2.0**-10
MXNET, MXNET_TWO = "MXNet pushpull", "MXNet push+pull"
ZEROMQ = "ZeroMQ"
_LOCALHOST = "127.0.0.1"


class PushPull(Protocol):
    """A store as one worker sees it."""

    server: int | None
    """Pid of its server process, if it has one."""

    def prepare(self, nbytes: int) -> None:
        """Make a key of zeros, and places for a gradient and the weights."""

    def compute(self) -> None:
        """Write a gradient of ones."""

    def call(self) -> None:
        """Push the gradient, and pull the weights after it; this is timed."""

    def weights(self) -> tuple[float, float]:
        """Pull the weights and return the smallest and the largest one."""


def serve(path: str, rank: int, stores: Mapping[str, PushPull]) -> None:
    """Answer the requests of the bench until it closes the socket."""
    worker = Worker(stores)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        with link.makefile("rw") as lines:
            _send(lines, {"rank": rank, "names": list(stores)})
            for line in lines:
                _send(lines, worker.answer(json.loads(line)))


class Worker:
    """Executes the requests of the bench."""

    def __init__(self, stores: Mapping[str, PushPull]) -> None:
        self._stores = stores

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer."""
        store = self._stores[request["name"]]
        if "prepare" in request:
            store.prepare(request["prepare"])
            return {"server": store.server}
        if "check" in request:
            return _check(request["name"], store, request["check"])
        return timed(store, request["measure"], request["limit"])


def timed(store: PushPull, calls: int, limit: float) -> dict[str, Any]:
    """Return the seconds of each call, and the CPU seconds of all of them, over all threads.

    Ends after a number of calls, or with the first call that ends after `limit` seconds.
    """
    clock, cpu_clock = time.perf_counter, time.process_time
    seconds: list[float] = []
    cpu, end = 0.0, clock() + limit
    while len(seconds) < calls and (not seconds or clock() < end):
        store.compute()
        cpu_before = cpu_clock()
        before = clock()
        store.call()
        seconds.append(clock() - before)
        cpu += cpu_clock() - cpu_before
    return {"seconds": seconds, "cpu": cpu}


def _check(name: str, store: PushPull, pushes: int) -> dict[str, Any]:
    low, high = store.weights()
    expected = -pushes * LR
    if low == high == expected:
        return {}
    return {
        "error": f"{name}: after {pushes} pushes the weights are {low} to {high}, not {expected}"
    }


def _send(lines: Any, message: Mapping[str, Any]) -> None:
    lines.write(f"{json.dumps(message)}\n")
    lines.flush()


class _MXNet:
    """Keys of MXNet's own store, from `first_key` + 1 on."""

    def __init__(self, mx: Any, store: Any, first_key: int) -> None:
        self.server: int | None = int(os.environ["BENCH_SERVER"])
        self._mx, self.store, self.key = mx, store, first_key

    def prepare(self, nbytes: int) -> None:
        self.key += 1
        shape = (nbytes // 4,)
        self.gradient, self.out = self._mx.nd.ones(shape), self._mx.nd.empty(shape)
        self.store.init(self.key, self._mx.nd.zeros(shape))

    def compute(self) -> None:
        self.gradient[:] = 1
        self.gradient.wait_to_read()

    def call(self) -> None:
        self.store.pushpull(self.key, self.gradient, out=self.out)
        self.out.wait_to_read()

    def weights(self) -> tuple[float, float]:
        self.store.pull(self.key, out=self.out)
        return float(self.out.min().asscalar()), float(self.out.max().asscalar())


class _MXNetTwoCalls(_MXNet):
    """The same with a call for each direction."""

    def call(self) -> None:
        self.store.push(self.key, self.gradient)
        self.store.pull(self.key, out=self.out)
        self.out.wait_to_read()


def _mxnet_stores() -> tuple[int, dict[str, PushPull]]:
    """Return the rank and MXNet's stores."""
    mx = _mxnet()
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=LR))
    return store.rank, {MXNET: _MXNet(mx, store, 0), MXNET_TWO: _MXNetTwoCalls(mx, store, 1000)}


def _mxnet() -> Any:
    """Import MXNet. In a server or scheduler this returns when the workers have ended."""
    # Its last release uses a name that numpy has removed.
    numpy: Any = import_module("numpy")
    if "bool" not in vars(numpy):
        numpy.bool = bool
    return import_module("mxnet")


class _ZeroMQ:
    """A DEALER for each worker and a ROUTER in the server, over a UNIX socket, without copies."""

    def __init__(self, path: str) -> None:
        self.server: int | None = int(os.environ["BENCH_SERVER"])
        zmq = import_module("zmq")
        self._np = import_module("numpy")
        self._link = zmq.Context.instance().socket(zmq.DEALER)
        self._link.connect(_endpoint(path))

    def prepare(self, nbytes: int) -> None:
        self._gradient = self._np.ones(nbytes // 4, self._np.float32)
        self._out = self._np.empty_like(self._gradient)
        self._exchange(b"new", self._gradient)

    def compute(self) -> None:
        self._gradient.fill(1)

    def call(self) -> None:
        self._exchange(b"push", self._gradient)

    def weights(self) -> tuple[float, float]:
        self._exchange(b"pull", self._gradient[:0])
        return float(self._out.min()), float(self._out.max())

    def _exchange(self, what: bytes, gradient: Any) -> None:
        self._link.send_multipart([what, gradient], copy=False)
        found = self._link.recv(copy=False)
        self._out[:] = self._np.frombuffer(found.buffer, self._np.float32)


def _endpoint(path: str) -> str:
    return f"ipc://{path}.zmq"


def _zeromq_server(path: str) -> None:
    """Update and return the weights until the process is terminated.

    The weights are sent without a copy, so those of another worker may be mixed in; this is in the
    favor of ZeroMQ.
    """
    zmq, np = import_module("zmq"), import_module("numpy")
    link = zmq.Context.instance().socket(zmq.ROUTER)
    link.bind(_endpoint(path))
    weights = step = np.zeros(0, np.float32)
    while True:
        worker, what, pushed = link.recv_multipart(copy=False)
        gradient = np.frombuffer(pushed.buffer, np.float32)
        if bytes(what.buffer) == b"new" and len(gradient) != len(weights):
            weights, step = np.zeros_like(gradient), np.empty_like(gradient)
        elif bytes(what.buffer) == b"push":
            np.multiply(gradient, np.float32(LR), out=step)
            np.subtract(weights, step, out=weights)
        link.send_multipart([worker, weights], copy=False)


# Processes of a peer


def lead(start: Callable[[list[str], Mapping[str, str]], int], kind: str, count: int) -> int:
    """Start the processes of a peer and wait for the workers; return the exit status.

    start: starts one with arguments and environment variables, and returns its pid.
    """
    env: dict[str, str] = {}
    if kind == "mxnet":
        env = _dmlc(count)
        start(["role"], {**env, "DMLC_ROLE": "scheduler"})
    # MXNet knows the role of a process from the environment.
    server = start(["server"] if kind != "mxnet" else ["role"], {**env, "DMLC_ROLE": "server"})
    env |= {"DMLC_ROLE": "worker", "BENCH_SERVER": str(server)}
    workers = {start(["worker", str(rank)], env) for rank in range(count)}
    while workers:
        pid, status = os.wait()
        # A server ends after the workers, unless something fails.
        if status or pid not in workers:
            return 1
        workers.remove(pid)
    return 0


def _dmlc(count: int) -> dict[str, str]:
    """Return the environment by which MXNet's processes find each other."""
    with socket.socket() as probe:
        probe.bind((_LOCALHOST, 0))
        port = probe.getsockname()[1]
    return {
        "DMLC_PS_ROOT_URI": _LOCALHOST,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": _LOCALHOST,
        "DMLC_NUM_WORKER": str(count),
        "DMLC_NUM_SERVER": "1",
    }


@contextmanager
def starting(
    command: list[str], path: str
) -> Iterator[Callable[[list[str], Mapping[str, str]], int]]:
    """Yield a function that starts processes; at the end all of them are killed.

    command: starts the file of the caller, which gets the arguments and `path`.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(arguments: list[str], env: Mapping[str, str]) -> int:
        started.append(subprocess.Popen([*command, *arguments, path], env={**os.environ, **env}))
        return started[-1].pid

    # The bench ends a team with SIGTERM.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield start
    finally:
        signal.signal(signal.SIGTERM, before)
        for each in started:
            each.kill()
            # Waits, unless `os.wait` already has its status.
            each.wait()


def main(kind: str, *rest: str) -> int:
    """Be the process that the arguments name."""
    path = rest[-1]
    if rest[0].isdecimal():
        with starting([sys.executable, "-I", __file__, kind], path) as start:
            return lead(start, kind, int(rest[0]))
    if rest[0] == "role":
        _mxnet()
    elif rest[0] == "server":
        _zeromq_server(path)
    elif kind == "mxnet":
        serve(path, *_mxnet_stores())
    else:
        serve(path, int(rest[1]), {ZEROMQ: _ZeroMQ(path)})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
