"""The codecs of a store: what `set_gradient_compression` chose for pushes and for pulls.

Servers receive them as text: `Codecs.text`, which `read_codecs` reads.
"""

from typing import NamedTuple

import torch

from allstep.compression import Codec, codec_from

_NONE, _BETWEEN = "none", ", pull "


class Codecs(NamedTuple):
    """How values are encoded on links; None: not at all."""

    push: Codec | None = None
    pull: Codec | None = None

    @property
    def text(self) -> str:
        """Both codecs as text, such as "2bit:0.5, pull bf16"."""
        push, pull = (_NONE if codec is None else codec.text for codec in self)
        return push if self.pull is None else f"{push}{_BETWEEN}{pull}"

    def of(self, dtype: torch.dtype) -> "Codecs":
        """Return the codecs of a key: none for a type that they cannot encode."""
        return self if dtype is torch.float32 else Codecs()


def read_codecs(text: str) -> Codecs:
    """Return the codecs of a text."""
    push, _, pull = text.partition(_BETWEEN)
    return Codecs(codec_from(push), codec_from(pull or _NONE))
