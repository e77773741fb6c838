"""Executes the messages of the coordinator's log, one at a time, in the order of the log.

All ranks read the same log. A message contains operations to run (the executor computes them, and
the results go into the handles of this rank's requests), a refusal, a change of the process sets,
or the end. `messages` lists the fields. One thread at a time calls `execute`: the one that drives
(see `driver`).
"""

from collections.abc import Sequence
from typing import Any

from allstep.engine import messages
from allstep.engine.autotune import Autotune
from allstep.engine.coordinator import Coordinator
from allstep.engine.engine_state import EngineState
from allstep.engine.executor import Executor
from allstep.engine.notices import Notices
from allstep.engine.pending import PendingRequests
from allstep.engine.request import Key, Kind, RequestSpec, decode, numbers
from allstep.engine.stop import Stop
from allstep.engine.stop_reasons import as_comm_error, error_in
from allstep.errors import CollectiveMismatch


class Dispatch:
    """Executes the messages of the log on this rank.

    `coordinator`: the coordinator on rank 0, None elsewhere. `autotune`: chooses the coordinator's
    fusion threshold; None if it is fixed.
    """

    def __init__(
        self,
        state: EngineState,
        requests: PendingRequests,
        executor: Executor,
        notices: Notices,
        stop: Stop,
        coordinator: Coordinator | None,
    ) -> None:
        self._state, self._requests, self._executor = state, requests, executor
        self._notices, self._stop, self._coordinator = notices, stop, coordinator
        self.autotune: Autotune | None = None

    def execute(self, fields: messages.Fields) -> None:
        """Execute one message of the log."""
        what = fields[0]
        if what == messages.DO:
            self._do(fields[1::2], fields[2::2])
        elif what == messages.REFUSE:
            self._refused((int(fields[1]), fields[2].decode()), fields[3], fields[4].decode())
        elif what == messages.JOINING:
            self._notices.set_any_joined(True)
        elif what == messages.JOINED:
            self._state.has_joined = False
            self._notices.set_any_joined(False)
            self._finish((0, "join.noname"), int(fields[1]))
        elif what == messages.ADD:
            number, ranks = int(fields[1]), numbers(fields[2].decode())
            self._executor.add_set(number, ranks)
            self._state.process_sets[number] = ranks
            self._finish((0, "process_set.add"), number)
        elif what == messages.REMOVE:
            number = int(fields[1])
            del self._state.process_sets[number]
            self._executor.remove_set(number)
            self._finish((0, "process_set.remove"), True)
        elif what == messages.NOTICE:
            if self._state.has_joined:
                self._notices.receive(fields[1].decode(), int(fields[2]))
        else:
            self._stop.stop(error_in(fields, self._state.world.rank))

    def _do(self, data: Sequence[bytes], more: Sequence[bytes]) -> None:
        specs = [decode(each) for each in data]
        state, requests = self._state, self._requests
        hooks, rank = state.hooks, state.world.rank
        hooks.negotiated(specs)
        if rank not in state.process_sets[specs[0].process_set]:
            return
        pending = [requests.by_key.pop(spec.key, None) for spec in specs]
        assert state.has_joined or None not in pending, (
            f"not requested on this rank: {[spec.name for spec in specs]}"
        )
        hooks.begins(specs)
        try:
            given = [each.wait_for_gpu() if each is not None else None for each in pending]
            results = self._executor.run(specs, more, given, hooks)
        except BaseException as error:
            hooks.ends(specs, None)
            for each in pending:
                if each is not None:
                    each.put(error=as_comm_error(error, rank))
            raise
        hooks.ends(specs, results)
        self._tune(specs)
        for each, result in zip(pending, results, strict=True):
            if each is not None:
                each.put(result)

    def _tune(self, specs: Sequence[RequestSpec]) -> None:
        if (
            self.autotune is not None
            and self._coordinator is not None
            and specs[0].kind is Kind.ALLREDUCE
        ):
            self._coordinator.fusion = self.autotune.reduced(specs)

    def _finish(self, key: Key, result: Any) -> None:
        pending = self._requests.by_key.pop(key, None)
        if pending is not None:
            pending.put(result)

    def _refused(self, key: Key, kind: bytes, why: str) -> None:
        state = self._state
        state.hooks.refused(key)
        is_member = state.world.rank in state.process_sets.get(key[0], ())
        pending = self._requests.by_key.pop(key, None) if is_member else None
        if pending is not None:
            mismatch = CollectiveMismatch(why, rank=state.world.rank, op=key[1])
            pending.put(error=ValueError(why) if kind == messages.VALUE else mismatch)
