"""The shared memory of a model: all of it is made at the start, when all parties are there.

    | party lines | claims | unit lines | order log | weights | optimizer state | gathering |

Later a party may be lost, and no memory can be made without it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest

from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import SLICE_LINE, aligned
from allstep.kvstore.memory.parties import Parties
from allstep.kvstore.memory.robust_mutex import MUTEX_BYTES
from allstep.kvstore.memory.slice_locks import Lock, SliceLocks
from allstep.kvstore.training.claims import Claims
from allstep.kvstore.training.gathering import Gathering
from allstep.kvstore.training.options import Options
from allstep.kvstore.training.order_log import OrderLog
from allstep.kvstore.training.party_lines import PartyLines
from allstep.kvstore.training.unit import Unit
from allstep.kvstore.training.unit_updates import StatePlan
from allstep.process.futex import address_of


class ModelMemory:
    """The parts of a model's shared memory, and the locks in it. A collective of all parties.

    plan: units and state. num_groups: parameter groups. averaged: see `Gathering`.
    """

    def __init__(
        self,
        parties: Parties,
        options: Options,
        plan: StatePlan,
        num_groups: int,
        averaged: Sequence[Tensor],
    ) -> None:
        size, layout = parties.size, plan.layout
        _check_same(parties, options, plan, averaged)
        # A torn push has an entry, too, and each party can leave one.
        capacity = options.log_capacity + 2 * size
        sizes = [
            PartyLines.nbytes(size),
            Claims.nbytes(size),
            len(layout.units) * SLICE_LINE,
            OrderLog.nbytes(capacity, num_groups),
            layout.nbytes,
            aligned(plan.nbytes),
            Gathering.nbytes(size, options.num_values, averaged),
        ]
        self.nbytes = sum(sizes)
        locks = SliceLocks(parties)
        memory, at = parties.allocate(self.nbytes), 0
        parts = []
        for nbytes in sizes:
            parts.append(memory[at : at + nbytes])
            at += nbytes
        lines, self.claims, units, log, self.weights, self.state, self.gathering = parts
        self.lines = PartyLines(lines, size)
        self.log = OrderLog(log, capacity, num_groups)
        self.claims_lock: Lock = locks.at(address_of(self.claims))
        self.units = [
            self._unit(index, units[index * SLICE_LINE :], locks, plan)
            for index in range(len(layout.units))
        ]

    def _unit(self, index: int, line: memoryview, locks: SliceLocks, plan: StatePlan) -> Unit:
        unit = plan.layout.units[index]
        numbers = line[MUTEX_BYTES:SLICE_LINE].cast("q")
        return Unit(index, (unit.start, unit.end), locks.at(address_of(line)), numbers, self.lines)


def _check_same(
    parties: Parties, options: Options, plan: StatePlan, averaged: Sequence[Tensor]
) -> None:
    """Raise UserError on all parties if they train different models, or differently."""
    texts = [
        *(f"{name}={value}" for name, value in asdict(options).items()),
        *(f"parameter {each}" for each in plan.layout.describe()),
        *(f"averaged {each.dtype} {list(each.shape)}" for each in averaged),
        *(f"{len(entries)} optimizer states" for unit in plan.entries for entries in unit),
    ]
    found = [json.loads(each) for each in parties.collect("model", json.dumps(texts))]
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            pairs = zip_longest(found[0], theirs, fillvalue="nothing")
            first, other = next((a, b) for a, b in pairs if a != b)
            raise UserError(
                f"sync={options.mode}: rank 0 has {first}, rank {rank} has {other}; all parties"
                " train the same model with the same settings"
            )
