"""`SharedModel`: the weights of a whole model in memory that the parties of a host share.

    shared.begin_round(position, limit, batch)
    while True:
        while (claim := shared.claims.next()) is not None:
            shared.begin(claim)
            ...                                # forward and backward on these samples
            optimizer.reduce_gradients()
            optimizer.apply()                  # pushes: waits for admission, updates, pulls
        point = shared.synchronize()
        if point is not None:
            break                              # None: a lost party has left claims; take them

A push (D16) is one pass over the units in their order: lock the next unit, unlock the last one,
update it with the party's gradient, copy the new weights to the party's own. No push overtakes
another, so pushes have one order, the same on all units, and a party always has the weights between
two pushes. The version of the model is the number of pushes.

A *round* is from one synchronization point to the next. In between parties do not wait for each
other, except as their mode demands (`admission`). At the point all pushes are done, all parties
have the same weights and know who is left. Nothing changes between a point and `begin_round`.

A lost party stops no other one: locks are freed by the kernel, its claims are given out again, and
barriers do not wait for it. It may leave one push half applied, which the order log marks as torn.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import Caller, Slice, in_turn
from allstep.kvstore.memory.parties import Parties
from allstep.kvstore.rules.gradient_age import NONE
from allstep.kvstore.training.admission import PushAdmission
from allstep.kvstore.training.claims import Claims
from allstep.kvstore.training.corrections import push_lr
from allstep.kvstore.training.elastic_copy import ALPHA, ElasticCopy, own_states
from allstep.kvstore.training.gathering import Gathering
from allstep.kvstore.training.model_copy import ModelCopy
from allstep.kvstore.training.model_memory import ModelMemory
from allstep.kvstore.training.options import Options
from allstep.kvstore.training.party_lines import (
    INDEX,
    PUSHING,
    READ,
    SERIAL,
    STEPS,
    TARGET,
    TORN,
)
from allstep.kvstore.training.push import Claim, Push
from allstep.kvstore.training.sync_point import SyncPoint
from allstep.kvstore.training.unit_updates import StateLayout
from allstep.kvstore.training.whole_state import put_state, whole_state

Values = Sequence[float] | Tensor | None


class SharedModel:
    """The shared weights, seen from one party. All parties of the host make it together.

    outer: the optimizer, whose parameters become copies of the shared weights; those of rank 0
    count. wrapped: its class. averaged: tensors to average at each synchronization point.
    """

    def __init__(
        self,
        parties: Parties,
        outer: Any,
        wrapped: type,
        plan: StateLayout,
        options: Options,
        averaged: Sequence[Tensor] = (),
    ) -> None:
        self.options, self._parties, self._outer = options, parties, outer
        self.rank, self.size = parties.rank, parties.size
        made = ElasticCopy if options.is_elastic else ModelCopy
        num_averaged = len(averaged)
        averaged = [*averaged, *(own_states(plan) if options.is_elastic else ())]
        memory = ModelMemory(parties, options, plan, len(outer.param_groups), averaged)
        self.nbytes = memory.nbytes
        self.slices: Sequence[Slice] = memory.units
        self._lines, self._log = memory.lines, memory.log
        self._caller = Caller(self.rank, parties.waiting)
        self._copy = made(outer, wrapped, plan, memory.weights, memory.state)
        averaged[num_averaged:] = self._copy.states_to_average()
        self._nbytes = plan.layout.nbytes
        self._gathering = Gathering(
            memory.gathering, self.rank, self.size, options.num_values, averaged, self._barrier
        )
        self.claims = Claims(
            memory.claims,
            memory.claims_lock,
            self.rank,
            self.size,
            options.steps,
            options.log_capacity,
            self,
            parties.waiting,
        )
        self.lost: dict[int, str] = {}
        """Lost parties, as far as this one knows, and why."""
        self._reported: set[int] = set()
        self.living: tuple[int, ...] = tuple(range(self.size))
        """The parties of this round, as all of them have agreed."""
        self.last_push: Push | None = None
        """The push of the last step; None if it made none."""
        self.waited = 0.0
        """Seconds for which the last push waited for admission."""
        # The versions of our weights, and at the last synchronization point.
        self._have = self._base = 0
        self._round, self._batch, self._serial = 0, 1, 0
        self._claim: Claim | None = None
        # Samples of the present block whose gradients have been added up.
        self._added = 0
        self._admission = self._new_admission()
        self._lines.announce(self.rank, NONE, 0)
        self.publish()
        self.take_state(outer.state)

    # Rounds

    @property
    def leader(self) -> int:
        """The lowest rank of this round: it does what one party does for all."""
        return self.living[0]

    def begin_round(self, position: int, limit: int, batch: int) -> None:
        """Let claims be taken from `position` to `limit`. A collective of the living parties.

        batch: samples of a global batch; a step has a party's share of it.
        """
        self._agree()
        self._round, self._batch = self._round + 1, batch
        share = max(1, batch // len(self.living))
        self._admission = self._new_admission()
        if isinstance(self._copy, ElasticCopy):
            self._copy.alpha = self.options.alpha or ALPHA / len(self.living)
        self.claims.begin_round(self._round, position, limit, share, self.options.epoch_size)

    def _new_admission(self) -> PushAdmission:
        others = set(self.living) - {self.rank}
        mode = self.options.mode
        return PushAdmission(mode, self._lines, self.rank, others, self._parties.waiting)

    def synchronize(self, values: Values = None) -> SyncPoint | None:
        """Wait until all pushes are done, and make all parties equal. A collective.

        values: numbers for the other parties. Return None if a lost party has left claims open: the
        caller takes them (`claims.next`) and calls this again.
        """
        self.claims.check_done()
        self._lines.announce(self.rank, NONE, 0)
        self._agree()
        is_over = not self.claims.num_open()
        self._pull(computes=False)
        self._copy.before_average()
        self._gathering.contribute()
        found = self._gathering.gather(values)
        if not is_over:
            return None
        self.living = tuple(found)
        self._gathering.average(self.living)
        self._copy.after_average()
        version = self.slices[0].num_updates
        pushes = self._log.read(self._base, version - self._base)
        self._base = version
        lost = {rank: why for rank, why in self.lost.items() if rank not in self._reported}
        self._reported |= lost.keys()
        return SyncPoint(version, self.claims.position, self.living, lost, pushes, found)

    def gather(self, values: Values) -> dict[int, Tensor]:
        """Return the numbers that each living party passes, by rank. A collective."""
        return self._gathering.gather(values)

    def _agree(self) -> None:
        """Wait for all living parties, and agree on which they are."""
        lost = self._barrier()
        self.living = tuple(rank for rank in range(self.size) if rank not in lost)

    def _barrier(self) -> set[int]:
        lost = self._parties.barrier(needs_all=False)
        for rank in lost:
            self._note_lost(rank)
        return lost

    # Steps

    def begin(self, claim: Claim) -> None:
        """Begin the step of a claim; its gradient is computed from the parameters as they are now.

        Claims are used in the order in which `claims.next` returned them.
        """
        self.claims.block_of(claim.start)
        if self._lines.get(self.rank, READ) == NONE:
            self._pull(computes=True)
        self._claim = claim

    def _take_claim(self, call: str) -> Claim:
        claim, self._claim = self._claim, None
        if claim is None:
            raise UserError(
                f"{call}: no step has begun; call shared.begin(claim) with a claim of"
                " shared.claims.next() before each step"
            )
        self.last_push, self.waited = None, 0.0
        return claim

    def skip(self) -> None:
        """Drop the gradient of this step; its samples count as done."""
        claim = self._take_claim("skip()")
        if claim.is_last:
            self._end_block(claim)

    def step(self) -> None:
        """Push the gradients of the parameters; in `lazy:K` at the last step of a block.

        In `elastic:H` update the own weights, and move at the last step of a block.
        """
        claim = self._take_claim("apply()")
        if self.options.steps == 1 or self.options.is_elastic:
            self._copy.take_gradients()
            self._added += claim.count
            self._step_alone()
        else:
            self._copy.take_gradients(claim.count, is_first=not self._added)
            self._added += claim.count
        if claim.is_last:
            self._end_block(claim)

    def _step_alone(self) -> None:
        """Make the step of a party on its own weights, if that is the mode."""
        if self.options.is_elastic:
            self._copy.check_parameters()
            groups = self._outer.param_groups
            self._copy.use_groups(groups, [float(group["lr"]) for group in groups])
            self._copy.step()

    def _end_block(self, claim: Claim) -> None:
        """Push what the steps of a block have added up, and close the block."""
        start, count, place = self.claims.block_of(claim.start)
        samples, self._added = self._added, 0
        if samples:
            if self.options.mode.name == "lazy":
                self._copy.divide_gradients(samples)
            self._push(start, count, place, samples)
        self.claims.close(start)
        self._lines.put(self.rank, PUSHING, 0)

    def _push(self, start: int, count: int, place: int, samples: int) -> None:
        self._copy.check_parameters()
        self._admission.begin()
        last, rank, lines = self.slices[-1], self.rank, self._lines
        call = f"sync={self.options.mode}, push"
        with closing(in_turn(self, self._caller, call, self._admission)) as units:
            for each in units:
                if not each.index:
                    self._begin_push(each, start, count, place, samples)
                if each is last:
                    # Units that this party left unfinished after an error are repaired by now.
                    lines.put(rank, TORN, 0)
                    lines.put(rank, TARGET, 2 * each.num_updates + 2)
                each.begin()
                self._copy.apply(each.index, self._delay)
                each.finish()
                self._copy.pull_after_push(each.index)
                if not each.index:
                    self._have = each.num_updates
                    lines.announce(rank, self._have, lines.get(rank, STEPS) + 1)
        self._outer.traffic.add(self._nbytes, self._nbytes)
        self._copy.bump_versions()

    def _begin_push(self, first: Slice, start: int, count: int, place: int, samples: int) -> None:
        """Record the push in the order log and our line. The caller has locked the first unit."""
        self.waited = self._admission.waited
        options, version, groups = self.options, first.num_updates, self._outer.param_groups
        age, scales = version - self._have, options.scale and not options.is_elastic
        lrs = tuple(
            push_lr(float(group["lr"]), samples, self._batch, age, scales, options.correct)
            for group in groups
        )
        self._delay = options.strength if age else 0.0
        self._copy.use_groups(groups, lrs)
        share = self.claims.share
        push = Push(self.rank, start, count, share, self._have, version + 1, lrs)
        lines, self._serial = self._lines, self._serial + 1
        lines.put(self.rank, TARGET, 0)
        self._log.write(version - self._base, self._serial, push)
        lines.put(self.rank, SERIAL, self._serial)
        lines.put(self.rank, INDEX, version - self._base)
        lines.put(self.rank, PUSHING, place)
        self.last_push = push

    def _pull(self, computes: bool) -> None:
        """Copy the newest weights. computes: whether a gradient will be computed from them."""
        with closing(in_turn(self, self._caller, f"sync={self.options.mode}, pull")) as units:
            for each in units:
                if not each.index:
                    self._have = each.num_updates
                    if computes:
                        self._lines.announce(self.rank, self._have, self._slowest())
                self._copy.pull(each.index)
        self._outer.traffic.add(0, self._nbytes)
        self._copy.bump_versions()

    def _slowest(self) -> int:
        """Return the pushes of the slowest party, so that one that begins late holds up none."""
        others = set(self.living) - {self.rank} - self.lost.keys()
        return min(self._lines.computing(others, STEPS).values(), default=0)

    # Lost parties

    def newly_lost(self) -> set[int]:
        """Return all lost parties, including those that are noticed only now."""
        for rank in range(self.size):
            if rank != self.rank and rank not in self.lost and self._is_lost(rank):
                self._note_lost(rank)
        return set(self.lost)

    def _is_lost(self, rank: int) -> bool:
        return self._parties.is_lost(rank, closely=False)

    def _note_lost(self, rank: int) -> None:
        self.lost.setdefault(rank, self._parties.why_lost(rank))

    def pushed_last(self, rank: int) -> int | None:
        """Return the place of the claim that a lost party pushed completely, if there is one.

        Marks an incomplete push in the order log.
        """
        lines, first, last = self._lines, self.slices[0], self.slices[-1]
        place = lines.get(rank, PUSHING)
        if not place:
            return None
        if lines.is_complete(rank, 2 * self._num_updates(last)):
            return place
        index, serial = lines.get(rank, INDEX), lines.get(rank, SERIAL)
        num_pushes = self._num_updates(first) - self._base
        if index < num_pushes and self._log.is_of(index, rank, serial):
            self._log.mark_torn(index)
        return None

    def _num_updates(self, unit: Slice) -> int:
        """Return the updates of a unit, once it is repaired if it was torn."""
        unit.acquire(self._caller, f"sync={self.options.mode}, claims of a lost party")
        try:
            return unit.num_updates
        finally:
            unit.release()

    # Weights and state as a whole: at a synchronization point only

    def publish(self) -> None:
        """Make the leader's weights those of all parties. A collective."""
        self._copy.check_parameters()
        self._led(self._copy.put)
        self._pull(computes=False)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return copies of the optimizer's state of each parameter, by its number."""
        updates = self._copy.updates
        return whole_state(self._copy.layout, updates.has_state, updates.states)

    def take_state(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Let the leader's state, by parameter, be the shared one. A collective."""
        shared, layout = self._copy.published, self._copy.layout
        self._led(lambda: put_state(layout, shared.has_state, shared.states, state))
        self._copy.take_published()

    def _led(self, act: Callable[[], None]) -> None:
        """Let the leader change shared memory while the others wait. A collective.

        If it is lost before it has finished, the next leader does all of it again.
        """
        self._agree()
        while True:
            leader = self.leader
            if self.rank == leader:
                act()
            self._agree()
            if leader in self.living:
                return

    def close(self) -> None:
        """Leave the other parties, which continue. The parameters stay as they are."""
        self._parties.close()
