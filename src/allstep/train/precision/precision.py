"""In which numbers a model computes.

| precision | the model computes in | gradients |
|---|---|---|
| float32 | float32 | as they are |
| bfloat16 | bfloat16 where that is safe (autocast); the same range as float32 | as they are |
| float16 | float16 where that is safe (autocast); a small range | the loss is scaled up before `backward`, the gradients down after it |
| float64 | float64, weights too: for comparing, not for speed | as they are |

`precision: auto` is settled before a `Precision` is made: see `precision_choice`.

The scale of float16 halves when a gradient overflows, and that step is left out; it doubles after
2,000 steps without. It is a number in the checkpoint like any other. Gradients are looked at after
they were reduced, so that all ranks leave out the same steps.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_START, _STEPS_TO_DOUBLE = 2.0**16, 2000
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """How the model of a run computes; `scale` is what a loss is multiplied with.

    why: the reason for it, in one line, where it was chosen by `precision: auto`.
    """

    def __init__(self, name: str, device: torch.device, why: str = "") -> None:
        self.name, self.device, self.why = name, device, why
        self.dtype = dtype_of_weights(name)
        self.scale = _START if name == "float16" else 1.0
        self.steps_since = 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Within it, the model's arithmetic is that of this precision."""
        lower = _AUTOCAST.get(self.name)
        return nullcontext() if lower is None else torch.autocast(self.device.type, dtype=lower)

    def unscale(self, gradients: list[Tensor]) -> bool:
        """Scales reduced gradients back; False when one of them overflowed, and the step is to be
        left out."""
        if self.name != "float16" or not gradients:
            return True
        overflowed = torch.zeros((), device=self.device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            gradients, overflowed, torch.full_like(overflowed, 1 / self.scale)
        )
        return self._note(bool(overflowed.item()))

    def _note(self, overflowed: bool) -> bool:
        self.steps_since = 0 if overflowed else self.steps_since + 1
        if overflowed:
            self.scale = max(1.0, self.scale / 2)
        elif self.steps_since == _STEPS_TO_DOUBLE:
            self.scale, self.steps_since = self.scale * 2, 0
        return not overflowed

    def state(self) -> dict[str, Any]:
        """For a checkpoint.

        The reason is not in it: equal states are equal files, on any machine.
        """
        return {"name": self.name, "scale": self.scale, "steps_since": self.steps_since}

    def load(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint; its name is that of `precision_choice.settle`."""
        self.scale, self.steps_since = state["scale"], int(state["steps_since"])


def dtype_of_weights(name: str) -> torch.dtype:
    """The type of parameters and input; `name` may be auto."""
    return torch.float64 if name == "float64" else torch.float32


def exact(logits: Tensor) -> Tensor:
    """In float32 or better: losses and their sums must not be rounded to 8 bits."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
