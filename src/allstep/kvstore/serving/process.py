"""The server process: accepts the stores that workers announce, until the run ends.

    python -m allstep.kvstore.serving.process

Started by `allstep run --servers N`, it has its name in ALLSTEP_SERVER and the launcher's store in
its environment; the agent of its host ends it with the run. Started by a worker, it reads name and
store from its standard input, and ends with that worker (`links.own_server`).

The main thread looks for announcements and at the links ten times a second; each link has a
thread of its own.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from allstep import wire
from allstep.comm.join.launcher_store import WireStore
from allstep.comm.join.rendezvous import connect_to_launcher
from allstep.console.escape import print_notice
from allstep.kvstore.links.announced import SERVER, read_announced, store_key, up_key
from allstep.kvstore.serving.link_thread import LinkThread
from allstep.kvstore.serving.served_store import ServedStore
from allstep.limits import Limits, read_limits
from allstep.process.family import die_with_parent

_LOOK_SECONDS = 0.1


class Server:
    """One server. has_more: returns whether further stores may come."""

    def __init__(
        self, name: str, store: Store, limits: Limits, has_more: Callable[[], bool]
    ) -> None:
        self._name, self._store, self._limits = name, store, limits
        self._has_more = has_more
        self._links: list[LinkThread] = []
        self._num_stores = 0
        # Why the store of the ranks cannot be used any more.
        self._error = ""
        self._connecting = 0
        # Gloo's connections are found by comparing open files, so one group connects at a time.
        self._one = threading.Lock()

    def run(self) -> None:
        """Serve until no store is left and none can come; raise if the ranks' store is gone."""
        card = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        self._store.set(up_key(self._name), card)
        while self._is_needed():
            if (text := self._next()) is not None:
                self._connecting += 1
                threading.Thread(target=self._accept, args=(text,), daemon=True).start()
            # In place: threads that accept a store append to it.
            for link in list(self._links):
                link.look()
                if link.is_over:
                    self._links.remove(link)
        if self._error:
            raise ConnectionError(self._error)

    def _is_needed(self) -> bool:
        has_links = self._connecting or not all(each.is_over for each in self._links)
        return bool(has_links) or (self._has_more() and not self._error)

    def _next(self) -> bytes | None:
        """Return the next announcement, or None after a moment."""
        key = store_key(self._name, self._num_stores + 1)
        try:
            # Not `wait`: torch's store logs each wait that times out.
            is_there = not self._error and self._has_more() and self._store.check([key])
        except (OSError, RuntimeError) as error:
            # Workers that are still connected continue to use this server.
            self._error = str(error).partition("\n")[0]
            is_there = False
        if not is_there:
            time.sleep(_LOOK_SECONDS)
            return None
        self._num_stores += 1
        return bytes(self._store.get(key))

    def _accept(self, text: bytes) -> None:
        """Connect to the workers of a store, in order of rank."""
        try:
            served = ServedStore(read_announced(text))
            for party in range(served.announced.num_parties):
                try:
                    with self._one:
                        link = LinkThread(served, party, self._store, self._limits)
                    self._links.append(link)
                except RuntimeError as error:
                    line = str(error).partition("\n")[0]
                    print_notice(
                        f"kvstore: server {self._name} has no link to rank {party}: {line}"
                    )
                    served.leave(party, in_order=False)
        except Exception as error:
            print_notice(f"kvstore: server {self._name} failed: {type(error).__name__}: {error}")
        finally:
            self._connecting -= 1


def main() -> int:
    """Run a server as a process; return its exit code."""
    torch.set_num_threads(1)
    limits = read_limits()
    try:
        if name := os.environ.get(SERVER):
            Server(name, connect_to_launcher(limits), limits, lambda: True).run()
        else:
            _serve_worker(limits)
    # The store of the ranks has ended, and the run with it.
    except (ConnectionError, RuntimeError) as error:
        print_notice(f"kvstore server: {str(error).partition(chr(10))[0]}")
        return 1
    return 0


def _serve_worker(limits: Limits) -> None:
    """Serve the worker that started this process, as it writes to the standard input."""
    die_with_parent()
    access: dict[str, Any] = json.loads(sys.stdin.readline())
    if os.getppid() != access["parent"]:
        return
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    with _reached(access, limits) as store:
        Server(access["name"], store, limits, lambda: not ended.is_set()).run()


@contextmanager
def _reached(access: dict[str, Any], limits: Limits) -> Iterator[Store]:
    if "tcp" in access:
        host, port = access["tcp"]
        yield TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limits.start))
        return
    host, port = access["wire"]
    client = wire.Client([(host, port)], access["token"], limits.start, access["ticket"])
    yield WireStore(client, timedelta(seconds=limits.timeout))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Threads that Gloo does not wake must not hold up the end.
    os._exit(code)
