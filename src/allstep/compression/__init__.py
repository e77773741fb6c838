"""Codecs that make gradients smaller before they are sent, and error feedback around any of them.

    codec = codec_from("2bit:0.5")
    feedback = ErrorFeedback(codec)                  # one for each tensor
    encoded = feedback.encode(gradient)              # uint8
    decode(codec, encoded, out=torch.empty(gradient.numel()))

```
codec_name       text such as "topk:1%", checked; needs no torch
codec_text       that text -> codec
error_feedback   what a codec drops is added to the next gradient
cast, int8, two_bit, one_bit, top_k, power_sgd     one kind of codec each
packed_bits      a few bits for each value, many values in an integer
blocks           the protocol `Codec`; a tensor is encoded in blocks that fit a core's cache
```

Tensors are flat, contiguous float32 in the host's memory. The size of the result depends only on
the number of elements, so both ends of a link know it and no header is needed.

May import: `errors`. Start with `blocks`, then `two_bit`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allstep.compression.blocks import Codec, add_decoded, decode, encode, encoded_nbytes
    from allstep.compression.codec_text import codec_from
    from allstep.compression.error_feedback import ErrorFeedback

__all__ = [
    "Codec",
    "ErrorFeedback",
    "add_decoded",
    "codec_from",
    "decode",
    "encode",
    "encoded_nbytes",
]

_HOMES = {"codec_from": "codec_text", "ErrorFeedback": "error_feedback"}


def __getattr__(name: str) -> Any:
    # On first use (PEP 562): a config names a codec, and is checked without torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'blocks')}"), name)
