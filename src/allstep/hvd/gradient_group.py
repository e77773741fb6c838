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
    number = process_set.process_set_id
    if number is None:
        raise ValueError(
            f"the optimizer's process set {process_set.ranks} is not registered since the last"
            " hvd.init(): give it to init(process_sets=[...]), or call hvd.add_process_set"
        )
    return running().group("gradients", number)
