"""The server process that the first worker of each host starts, where `allstep run` started none.

It is started for the first store over several hosts and serves later ones too. It ends with its
worker: the kernel kills it if the worker is killed. A worker that ends in order lets it continue
until all other workers have left its stores, and waits for that at its exit: in MXNet, worker 0
that ends first stops the servers under the others.

The server reads from its standard input how to reach the store of the ranks, so no secret is on a
command line; the end of that input means that no further store will come.
"""

import atexit
import json
import os
import secrets
import subprocess
import weakref
from typing import Any, Protocol

from torch._C._distributed_c10d import Store, TCPStore

from allstep.comm.join.launcher_store import WireStore, root_of
from allstep.console.escape import print_notice
from allstep.errors import CommError
from allstep.kvstore.links.announced import COUNT, SERVER
from allstep.limits import read_limits
from allstep.process.python import run_module

_MODULE = "allstep.kvstore.serving.process"


class Closable(Protocol):
    """The links of a store."""

    def close(self) -> None:
        """Leave the store."""


class OwnServer:
    """A server process of this worker. `name`: see `announced`."""

    def __init__(self, store: Store) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(6)}"
        # The stores of this worker, which it leaves before it waits for the other workers.
        self.links: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._owner = os.getpid()
        access = {"name": self.name, "parent": os.getpid(), **_access(store)}
        env = {name: value for name, value in os.environ.items() if name not in (COUNT, SERVER)}
        # Links are served by threads of ours, each with torch calls of one thread.
        env["OMP_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(run_module(_MODULE), stdin=subprocess.PIPE, env=env)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(access).encode() + b"\n")
        self._process.stdin.flush()
        atexit.register(self.finish)

    def has_ended(self) -> bool:
        """Return whether the process is gone."""
        return self._process.poll() is not None

    def finish(self) -> None:
        """Let it end when all workers have left its stores, and wait for that."""
        if os.getpid() != self._owner or self._process.stdin is None:
            return
        for links in list(self.links):
            links.close()
        self._process.stdin.close()
        try:
            self._process.wait(read_limits().stall)
        except subprocess.TimeoutExpired:
            print_notice("this worker has ended, and waits for others that use its kvstore server")
            self._process.wait()


_own: OwnServer | None = None


def own_server(store: Store) -> OwnServer:
    """Return the server of this process, which is started at the first call."""
    global _own
    # A forked worker needs its own; so does one whose server was killed.
    if _own is None or _own._owner != os.getpid() or _own.has_ended():
        _own = OwnServer(store)
    return _own


def _access(store: Store) -> dict[str, Any]:
    """Return how another process of this host reaches the store of the ranks."""
    root = root_of(store)
    if isinstance(root, WireStore):
        address, token, ticket = root.client.access
        return {"wire": list(address), "token": token, "ticket": ticket}
    if isinstance(root, TCPStore):
        return {"tcp": [root.host, root.port]}
    raise CommError(
        f"kvstore: no server process can reach the ranks' store, a {type(root).__name__}; start"
        " the script with `allstep run --servers N`"
    )
