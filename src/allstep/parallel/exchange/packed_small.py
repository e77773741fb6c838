"""Tensors as few messages: large ones as they are, small ones together, by dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor

from allstep.parallel.exchange.buckets import is_large


class Packed:
    """Flat tensors to send, or to receive into; after that `unpack` copies the small ones back."""

    def __init__(self, flats: Sequence[Tensor]) -> None:
        large = [flat for flat in flats if is_large(flat)]
        small: dict[torch.dtype, list[Tensor]] = {}
        for flat in flats:
            if not is_large(flat):
                small.setdefault(flat.dtype, []).append(flat)
        self._small = [(torch.cat(together), together) for together in small.values()]
        self.tensors = [*large, *(buffer for buffer, _ in self._small)]

    def unpack(self) -> None:
        """Copy what the buffers have to the small tensors."""
        for buffer, together in self._small:
            sizes = [flat.numel() for flat in together]
            torch._foreach_copy_(together, torch.split_with_sizes(buffer, sizes))
