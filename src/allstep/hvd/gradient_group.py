"""The process group for gradients.

It is not the engine's group, since hooks and the engine's thread work at the same time (D5).
"""

from allstep.comm.group.process_group import AllstepGroup
from allstep.hvd.place import running
from allstep.hvd.process_sets import ProcessSet


def gradient_group(process_set: ProcessSet) -> AllstepGroup:
    """Return the group that all optimizers of a process set share.

    It is created on the first call, by all members together.
    """
    return running().group("gradients", registered_number(process_set))


def registered_number(process_set: ProcessSet) -> int:
    """Return the number of an optimizer's process set; raise ValueError if it has none."""
    if process_set.process_set_id is None:
        raise ValueError(
            f"the optimizer's process set {process_set.ranks} is not registered since the last"
            " hvd.init(): give it to init(process_sets=[...]), or call hvd.add_process_set; in an"
            " elastic run in a callback of state.register_reset_callbacks"
        )
    return process_set.process_set_id
