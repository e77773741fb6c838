"""How many samples a worker may compute at once when its share of a growing batch gets larger: as
many as its memory surely holds.

```
bytes of a sample     what autograd keeps of a forward pass of 4 samples, less that of 2, halved; twice that, since the backward pass
                      makes gradients of the same sizes
memory of a worker    its GPU's, or an equal part of what its host (or its cgroup) has in all room
the samples whose bytes fill a quarter of the memory: weights, optimizer, images and others want
the rest ```

Nothing of this depends on the moment: not on what is free just now, not on what a process happens
to hold. So the same run on the same machine always comes to the same number, hence to the same
bits; and since a checkpoint has the number, a resumed run does so anywhere.

A model with batch norms gets no room: with larger pieces their statistics would be those of more
samples, and the run another one.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from allstep import machine
from allstep.world import World

_PART = 0.25
_WITH_GRADIENTS = 2
_FEW, _MANY = 2, 4  # samples


Forward = Callable[[nn.Module, int], Tensor]
"""What a model makes of so many samples."""


def samples_at_once(model: nn.Module, forward: Forward, nbytes: int) -> int:
    """So many may be computed at once with a memory of `nbytes`; 0 where nobody can tell.

    The model is left as it was.
    """
    if any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        return 0
    try:
        with torch.random.fork_rng(devices=[]):
            each = bytes_of_sample(copy.deepcopy(model), forward)
    except (
        Exception
    ):  # whatever a user's model raises: it has not been asked to take two samples yet
        return 0
    return int(_PART * nbytes / (_WITH_GRADIENTS * each)) if each > 0 else 0


def bytes_of_sample(model: nn.Module, forward: Forward) -> int:
    """What autograd keeps of one sample until its backward pass; weights and the like, of which
    there is one copy, do not count."""
    return (_kept(model, forward, _MANY) - _kept(model, forward, _FEW)) // (_MANY - _FEW)


def _kept(model: nn.Module, forward: Forward, count: int) -> int:
    """Bytes that autograd keeps of a forward pass; what several operations keep counts once."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(model, count)
    return sum(each.untyped_storage().nbytes() for each in kept.values())


def memory_of_worker(world: World, device: torch.device) -> int:
    """Bytes: of its GPU, else its part of what the host has, whoever uses it now."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = machine.memory()
    return min(found.total, found.limit or found.total) // world.local_size
