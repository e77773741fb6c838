"""Batch memory is reused once no reference to it is left, and not before."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from allstep.data.loading.memory import Buffer, Memory, SharedBuffer
from allstep.errors import AllstepError


@pytest.mark.parametrize("make", [Buffer, SharedBuffer])
def test_any_view_holds_the_memory(make: type[Buffer]) -> None:
    memory = Memory(4, make)
    buffer, array = memory.take((10, 4))
    tensor = torch.from_numpy(array)
    views = [
        array[2:],
        array.T[1],
        array.view(np.int16),
        tensor[3],
        tensor.permute(1, 0),
        tensor.numpy()[1:],
        memoryview(array),
    ]
    del array, tensor
    while views:
        others = [memory.take((1,))[0] for _ in range(3)]
        assert buffer not in others
        views.pop()
    others = [memory.take((1,)) for _ in range(3)]
    assert buffer in [other for other, _ in others]


def test_small_buffers_are_dropped_and_at_most_keep_are_free() -> None:
    memory = Memory(2)
    held = [memory.take((100,)) for _ in range(5)]
    first = [buffer for buffer, _ in held]
    del held
    kept = [memory.take((100,)) for _ in range(3)]
    assert [buffer in first for buffer, _ in kept] == [True, True, False]
    del kept
    larger, array = memory.take((101,))
    assert larger.nbytes == 101
    assert not memory._free
    del array
    assert memory.take((50,), np.int16)[0] is larger


def test_shared_memory_has_no_name_and_closes_its_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    memory = Memory(1, SharedBuffer)
    buffer, array = memory.take((1000,))
    assert isinstance(buffer, SharedBuffer)
    assert buffer.number in SharedBuffer.alive
    del buffer, array, memory
    gc.collect()
    assert not SharedBuffer.alive
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_too_much_is_an_error_before_it_is_a_bus_error() -> None:
    with pytest.raises(AllstepError, match="no memory for a batch of"):
        SharedBuffer(1 << 60)
