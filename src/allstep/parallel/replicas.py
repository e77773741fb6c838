"""What an optimizer must know about the replicas on the other ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from allstep.comm.group.process_group import AllstepGroup
from allstep.parallel.exchange import Listener, Named, Rule
from allstep.parallel.exchange.buckets import BUCKET


@dataclass
class Replicas:
    """How replicas train together.

    `named`: the parameters, under names that are the same on all ranks. `group`: returns the
    process group for gradients; called when it is first needed. `key`: returns what distinguishes
    this optimizer from others on the same group; called like `group`. `rule`: the reduction.
    `passes`: backward passes that are added up before a step. `listener`: notified of each
    reduction. `overlap`: whether gradients are reduced during backward(); None: where it helps.
    `bucket`: bytes that are then reduced together.
    """

    named: list[Named]
    group: Callable[[], AllstepGroup]
    key: Callable[[], str]
    rule: Rule
    passes: int = 1
    listener: Listener | None = None
    overlap: bool | None = None
    bucket: int = BUCKET
