"""Which workers form the next world, in which order, and whose state they take: pure functions.

- A ready member *holds the state* unless it reports that its state is not whole, or is new in its
  generation and has fewer updates than the source had: the source died during the broadcast.
- The source is the holder with the most updates, the lowest old rank among equals.
- Ranks: holders keep their relative order. Hosts follow in the order of their first holder, then
  hosts without one in the order in which they were found; on a host holders come first. So ranks of
  a host are consecutive, old hosts keep low ranks (Horovod's contract), and rank 0 holds the state.
- Members on withdrawn hosts are left out, with one exception: if they alone hold the state, the
  source stays for one more generation, so that new workers can take its state.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from allstep.launch.roster.actions import Plan
from allstep.launch.roster.elastic_policy import Policy
from allstep.launch.roster.living_workers import LivingWorker


class Candidates(NamedTuple):
    """The workers from which a world can be formed.

    ready: living members of the plan before, by old rank. standby: new workers in the order of
    their slots. offered: returns whether a worker's slot is still offered. hosts: in the order of
    discovery.
    """

    ready: Sequence[LivingWorker]
    standby: Sequence[LivingWorker]
    offered: Callable[[LivingWorker], bool]
    hosts: Sequence[str]

    @property
    def holders(self) -> list[LivingWorker]:
        """Return the ready members that hold the state."""
        return [worker for worker in self.ready if worker.holds_state]


class Selection(NamedTuple):
    """The members of the next world that were in the last one, and those that join it."""

    stay: list[LivingWorker]
    join: list[LivingWorker]


def select(candidates: Candidates, policy: Policy) -> Selection | None:
    """Return the members of the next world; None while there are too few."""
    stay = [worker for worker in candidates.ready if candidates.offered(worker)]
    stay = _with_state(stay, candidates)
    room = policy.room_for(len(stay))
    join = [worker for worker in candidates.standby if candidates.offered(worker)]
    join = join[: int(min(room, len(join)))]
    members = stay + join
    if len(members) < policy.min_workers or not any(map(candidates.offered, members)):
        return None
    return Selection(stay, join)


def _with_state(stay: list[LivingWorker], candidates: Candidates) -> list[LivingWorker]:
    """Add the source to members none of which holds the state."""
    holders = candidates.holders
    if not holders or any(worker in stay for worker in holders):
        return stay
    return [*stay, source_of(holders)]


def source_of(holders: Sequence[LivingWorker]) -> LivingWorker:
    """Return the worker whose state the others take. holders: by old rank."""
    # max() returns the first of equals.
    return max(holders, key=lambda worker: worker.updates)


def order_by_rank(
    holders: Sequence[LivingWorker], others: Sequence[LivingWorker], hosts: Sequence[str]
) -> list[LivingWorker]:
    """Return the members by rank. holders: members that hold the state, by old rank."""
    old = [worker.host for worker in holders]
    host_order = list(dict.fromkeys([*old, *hosts]))
    first = [worker.number for worker in holders]

    def rank_key(worker: LivingWorker) -> tuple[int, int, int]:
        place = first.index(worker.number) if worker.number in first else len(first)
        return host_order.index(worker.host), place, worker.place[1]

    return sorted([*holders, *others], key=rank_key)


def first_plan(standby: Sequence[LivingWorker], policy: Policy, hosts: Sequence[str]) -> Plan:
    """Return the plan of generation 0, from all workers on standby up to the maximum."""
    chosen = standby[: int(min(policy.room_for(0), len(standby)))]
    members = tuple(worker.number for worker in order_by_rank([], chosen, hosts))
    return Plan(0, members, None, "start", new=members)


def next_plan(selection: Selection, candidates: Candidates, generation: int, reason: str) -> Plan:
    """Return the plan of a later generation."""
    holders = [worker for worker in candidates.holders if worker in selection.stay]
    source = source_of(holders)
    others = [worker for worker in selection.stay if worker not in holders] + selection.join
    return Plan(
        generation,
        tuple(each.number for each in order_by_rank(holders, others, candidates.hosts)),
        source.number,
        reason,
        new=tuple(each.number for each in selection.join),
        behind=tuple(each.number for each in selection.stay if not _agree(each, source)),
        updates=source.updates,
    )


def _agree(worker: LivingWorker, source: LivingWorker) -> bool:
    return worker.holds_state and worker.updates == source.updates
