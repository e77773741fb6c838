"""Cast a model to another precision, complex tensors included.

`model.to(torch.float32)` makes complex numbers real: it drops their imaginary parts, with a warning
that is easy to miss. A filter in the frequency domain is a model with such parameters. So `cast`
chooses the type of each tensor by its kind:

```
precision    real tensors   complex tensors   integers
float32      float32        complex64         unchanged
float64      float64        complex128        unchanged
```
"""

import torch
from torch import Tensor, nn

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def cast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move a model to `device`, cast its parameters and buffers to `dtype`, and return it.

    `dtype` is float32 or float64. The model is changed in place.
    """

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(device, _COMPLEX[dtype])
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    # Module.to() itself uses `_apply`, which torch does not annotate.
    return model._apply(moved)  # type: ignore[no-untyped-call, no-any-return]
