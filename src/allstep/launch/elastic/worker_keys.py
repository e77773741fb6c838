"""The keys of single workers in the launcher's store: requests, answers, progress.

A worker has at most one request, the last answer and its progress there. They are deleted when it
has ended: a run that replaces workers for weeks keeps the keys of the living ones only.
"""

import json
from collections.abc import Mapping
from typing import Any

from allstep.launch.elastic.worker_table import ElasticWorker
from allstep.wire import Server, keys


class WorkerKeys:
    """The keys of the workers of one run."""

    def __init__(self, store: Server) -> None:
        self._store = store
        self._progress: dict[str, bytes] = {}

    def answer(self, worker: ElasticWorker, reply: Mapping[str, Any]) -> None:
        """Answer the request of a worker for a place; its last request and answer are deleted."""
        asked, worker.num_answered = worker.num_answered, worker.num_answered + 1
        self._store.delete_prefix(keys.ask_of(worker.ticket, asked))
        self._store.delete_prefix(keys.place_of(worker.ticket, asked - 1))
        self._store.set(keys.place_of(worker.ticket, asked), json.dumps(reply).encode())

    def refuse(self, asked: str) -> None:
        """Answer a request that was not expected, by its key: the process must exit."""
        refusal = {"dismissed": "the launcher did not expect its request", "code": 1}
        self._store.set(asked.replace("/ask/", "/place/"), json.dumps(refusal).encode())

    def new_progress(self, worker: ElasticWorker) -> bytes | None:
        """Return what a worker has written about its steps; None if that has been returned."""
        value = self._store.peek(keys.progress_of(worker.ticket))
        if value is None or value == self._progress.get(worker.ticket):
            return None
        self._progress[worker.ticket] = value
        return value

    def forget(self, worker: ElasticWorker) -> None:
        """Delete the keys of a worker that has ended; the store does not admit it any more."""
        self._progress.pop(worker.ticket, None)
        for prefix in keys.all_of(worker.ticket):
            self._store.delete_prefix(prefix)

    def forget_request(self, asked: str) -> None:
        """Delete a request of a worker that has ended meanwhile, by its key."""
        self._store.delete_prefix(asked)
