"""The group over which gradients travel: apart from the engine's, since hooks and the engine's
thread work at the same time (D5)."""

from allstep.comm.group.process_group import AllstepGroup
from allstep.hvd.place import running
from allstep.hvd.process_sets import ProcessSet


def gradient_group(process_set: ProcessSet) -> AllstepGroup:
    """One for all optimizers of a process set; made when the first of them needs it, on all members
    together."""
    number = process_set.process_set_id
    if number is None:
        raise ValueError(
            f"the optimizer's process set {process_set.ranks} is not registered since the last"
            " hvd.init(): give it to init(process_sets=[...]), or call hvd.add_process_set"
        )
    return running().group("gradients", number)
