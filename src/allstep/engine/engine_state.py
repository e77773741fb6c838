"""The state that the parts of one engine share: position in the world, process sets, listener.

`pending`, `stop`, `dispatch` and `driver` all hold the same `EngineState`. It has no behavior.
"""

from dataclasses import dataclass, field

from allstep.engine.hooks import Hooks
from allstep.world import World


@dataclass(slots=True)
class EngineState:
    """The values that every part of an engine reads.

    `process_sets`: the ranks of each set by its number; 0 is the world. `dispatch` changes it.
    `hooks`: the listener; may be replaced while the engine runs. `has_joined`: whether this rank
    has called join and the other ranks have not all done so.
    """

    world: World
    process_sets: dict[int, tuple[int, ...]]
    hooks: Hooks = field(default_factory=Hooks)
    has_joined: bool = False
