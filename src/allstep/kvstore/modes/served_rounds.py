"""Mode sync over several hosts: two levels (D16).

Level 1 is a host: its workers contribute gradients in shared memory, as in `each_round`. The worker
that contributes last adds them in order of rank and sends the sum, slice by slice, each to its
server. Level 2 are the servers: each adds the sums of the hosts in their order and updates. So the
bits do not depend on which worker or host came first.

A pull arrives once per host. The workers that pull share the work: each begins at another part of
the key, locks the slices that the host does not have yet, asks for all of them at once, and leaves
the value in shared memory for the others. Bytes on the network are those of one exchange per host,
over the links of all its workers.

    push     contribute; if all workers of the host have: sum and send
    pull     for chunks of slices: lock, request what is missing, receive into shared memory, copy

Where pushes are compressed, the sum of a host is encoded, not the gradient of each worker: what
does not cross a link loses nothing, and one sum has the bytes of one gradient. What it drops
belongs to the host, so it is in shared memory: another worker may send the next sum. Pulls are the
same bytes for all hosts, so their weights stay equal.

Rows of a gradient are added in the same way, and only they are sent: if all workers of the host
contribute rows, their union; if all hosts do, the servers update these rows only.

A push never waits for another host, so no order of pushes and pulls can block two hosts. A lost
worker on any host ends the store with PeerLost: the rounds cannot be completed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from allstep.kvstore.memory.key_memory import KeyShape, Slice, StoredKey, tensor_in
from allstep.kvstore.modes.each_round import EachRound
from allstep.kvstore.modes.key_wire import KeyWire
from allstep.kvstore.modes.row_wire import push_rows
from allstep.kvstore.modes.served_values import ServedValues
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.store_kinds import StoreKind
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.row_updates import Rows, sum_of_rows
from allstep.kvstore.updates.states_file import Named

# The number in a worker's line, after those of `each_round`: rounds that it has sent for its host.
_SENT = 2
# Slices that a worker locks and requests at once.
_CHUNK = 8


class ServedRounds(ServedValues, EachRound):
    """Mode sync with servers: an update once all workers of all hosts have pushed."""

    def __init__(self, kind: StoreKind) -> None:
        ServedValues.__init__(self, kind)
        try:
            EachRound.__init__(self, kind, self.servers.members)
        except BaseException:
            self.servers.close()
            raise
        self.rank, self.num_workers = self.servers.rank, self.servers.size

    # Keys and optimizer

    def _add(self, forms: Sequence[KeyShape], values: Mapping[Key, Tensor]) -> None:
        placed = self.servers.place(forms)
        added = self.stored_keys(placed)
        self.connect(added)
        self.servers.from_rank_0("init", lambda: self.servers.send_values(placed, values))
        if self.parties.rank == 0:
            for stored in added:
                wire = self.wires[stored.key]
                requests = [wire.whole(each.index, stored.flat) for each in stored.slices]
                self.servers.run(requests, "init")
        self.servers.barrier(needs_all=True)
        self.keys.update({stored.key: stored for stored in added})

    def connect(self, added: Sequence[StoredKey]) -> None:
        """Prepare to send these keys: the residual of a host's sums is in its shared memory."""
        for stored in added:
            push, _ = self.codecs.of(stored.dtype)
            residual = None if push is None else self._shared_residual(stored.form)
            wire = KeyWire(stored, self.servers.parts[stored.key], self.codecs, residual)
            # Shared memory holds the value from `init` on.
            wire.has_pulled()
            self.wires[stored.key] = wire

    def _shared_residual(self, form: KeyShape) -> Tensor:
        memory = self.parties.allocate(max(1, form.numel * form.dtype.itemsize))
        return tensor_in(memory, 0, form.dtype, form.numel)

    def set_optimizer(self, chosen: OptimizerClass) -> None:
        """Update with this optimizer on the servers, which keep its state if settings change."""
        self.servers.check_same("set_optimizer", [chosen.to_json()])
        for stored in self.keys.values():
            self._finish(stored, self._round(stored), ())
        self.servers.barrier(needs_all=True)
        if chosen.is_whole and not self.servers.is_whole:
            self._cut_no_key()
        self.servers.from_rank_0("set_optimizer", lambda: self.servers.send_optimizer(chosen))
        self.chosen = chosen
        self.servers.warn_if_idle()

    def _cut_no_key(self) -> None:
        """Place all keys again, each whole on one server."""
        keys, self.keys = self.keys, {}
        self.servers.place_whole()
        if keys:
            forms = [KeyShape(key, each.shape, each.dtype) for key, each in keys.items()]
            self._add(forms, {key: each.flat.view(each.shape) for key, each in keys.items()})

    # Values

    def push(self, stored: StoredKey, gradient: Tensor) -> None:
        """Contribute to the next round; the last worker of the host sends its sum."""
        super().push(stored, gradient)
        self._send_if_last(stored, self._round(stored))

    def push_rows(self, stored: StoredKey, rows: Rows) -> None:
        """Contribute rows to the next round; if all workers of the host have, their sum is sent."""
        super().push_rows(stored, rows)
        self._send_if_last(stored, self._round(stored))

    def _begin(self, stored: StoredKey) -> int:
        """Return the number of this worker's rounds so far, once it may contribute to the next one.

        After a round of rows the value is not received: their owners may need only some of it. The
        servers let the next contribution of the host wait for the end of the round.
        """
        number = self._round(stored)
        if not self._has_pushed_rows(stored):
            return super()._begin(stored)
        self._wait_for_pushes(stored, number)
        self._send_if_last(stored, number)
        return number

    def _has_pushed_rows(self, stored: StoredKey) -> bool:
        return self._rows_in(stored, self.parties.rank) is not None

    def rows(self, stored: StoredKey, numbers: Tensor) -> Tensor:
        """Return rows after the round of the last push; if that was of rows, only rows are sent."""
        if not self._has_pushed_rows(stored):
            return super().rows(stored, numbers)
        number = self._begin(stored)
        return self.pulled_rows(stored, numbers, number=number)

    def _send_if_last(self, stored: StoredKey, number: int) -> None:
        """Send the sum of the host for a round, unless workers are missing or another has sent it.

        The lock of the first slice makes sure that one worker does.
        """
        first = stored.slices[0]
        first.acquire(self._caller, "push")
        try:
            if self._has_contributions(stored, number) and self._num_sent(stored) < number:
                self._send(stored)
                stored.workers[stored.number(0, _SENT)] = number
        finally:
            first.release()

    def _num_sent(self, stored: StoredKey) -> int:
        return stored.workers[stored.number(0, _SENT)]

    def _has_contributions(self, stored: StoredKey, number: int) -> bool:
        self._fence()
        workers = range(self.parties.size)
        return all(stored.workers[stored.number(each, 0)] >= number for each in workers)

    def _send(self, stored: StoredKey) -> None:
        """Send the sum of all contributions of the host; slices are added as they are sent."""
        wire, size = self.wires[stored.key], self.parties.size
        rows = [self._rows_in(stored, rank) for rank in range(size)]
        contributed = [each for each in rows if each is not None]
        if len(contributed) == size:
            total = sum_of_rows(contributed, 0, stored.form.num_rows)
            requests = push_rows(stored, self.servers.parts[stored.key], total)
        else:
            requests = [
                wire.push(each.index, partial(self._host_sum, stored, each))
                for each in stored.slices
            ]
        self.servers.run(requests, f"push of key {stored.key!r}")

    def _host_sum(self, stored: StoredKey, each: Slice) -> Tensor:
        """Return the sum of a slice, in memory that the next one overwrites."""
        parts = [self._part(stored, rank, each) for rank in range(self.parties.size)]
        return parts[0] if len(parts) == 1 else self._sum(parts, stored.dtype)

    def _finish(self, stored: StoredKey, number: int, outs: Sequence[Tensor]) -> None:
        """Wait for round `number`, receive what this host does not have, and copy the value."""
        self._wait_for_pushes(stored, number)
        self._send_if_last(stored, number)
        for chunk in self._chunks(stored):
            with ExitStack() as held:
                for each in chunk:
                    each.acquire(self._caller, "pull")
                    held.callback(each.release)
                missing = [each.index for each in chunk if each.num_updates < number]
                if missing:
                    self._receive(stored, missing, number)
                for each in chunk:
                    self.copy_slice(stored, each, outs)

    def _chunks(self, stored: StoredKey) -> Iterator[Sequence[Slice]]:
        """Yield some slices at a time, beginning at another place in each worker of the host."""
        slices = stored.slices
        starts = list(range(0, len(slices), _CHUNK))
        first = self.parties.rank * len(starts) // self.parties.size
        for start in (*starts[first:], *starts[:first]):
            yield slices[start : start + _CHUNK]

    def _receive(self, stored: StoredKey, indexes: Sequence[int], number: int) -> None:
        """Receive slices of a round into the memory of the host, and count it for each."""
        wire = self.wires[stored.key]
        requests = [
            wire.pull(
                index,
                stored.flat,
                number=number,
                done=partial(self._count, stored.slices[index], number),
            )
            for index in indexes
        ]
        self.servers.run(requests, f"pull of key {stored.key!r}")

    @staticmethod
    def _count(each: Slice, number: int) -> None:
        """Count the updates of a slice that a server has made."""
        while each.num_updates < number:
            each.begin()
            each.finish()

    # State

    def state(self, stored: StoredKey) -> list[Named]:
        """Return the state of a key's optimizer, from its servers, after the last round."""
        self._finish(stored, self._round(stored), ())
        return self.servers.state(stored)

    def put_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Set the state of keys, after their last rounds, while all workers are here."""
        for key in states:
            self._finish(self.keys[key], self._round(self.keys[key]), ())
        super().put_states(states)

    # All workers

    def barrier(self) -> None:
        """Wait until all workers of all hosts have called this."""
        self.servers.warn_if_idle()
        self.servers.barrier(needs_all=True)

    def close(self) -> None:
        """Leave the other workers, which continue."""
        self.servers.close()
        super().close()
