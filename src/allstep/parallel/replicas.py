"""How replicas train as one: what an optimizer must know of them."""

from collections.abc import Callable
from dataclasses import dataclass

from allstep.comm.group.process_group import AllstepGroup
from allstep.parallel.exchange import Listener, Named, Rule


@dataclass
class Replicas:
    """How replicas train as one.

    named: the parameters, by names that all ranks have. group: the group over which gradients
    travel, made when it is first needed. key: tells this optimizer from others on the same group.
    rule: what is computed. passes: how many backward passes add up before a step. listener: hears
    of each reduction. overlap: whether gradients travel during backward(); None: where it helps.
    """

    named: list[Named]
    group: Callable[[], AllstepGroup]
    key: str
    rule: Rule
    passes: int = 1
    listener: Listener | None = None
    overlap: bool | None = None
