"""The codec that a text such as "topk:1%" names; `codec_name` has the texts."""

from collections.abc import Callable

import torch

from allstep.compression.blocks import Codec
from allstep.compression.cast import Cast
from allstep.compression.codec_name import CodecName, codec_name
from allstep.compression.int8 import Int8
from allstep.compression.one_bit import OneBit
from allstep.compression.power_sgd import PowerSGD
from allstep.compression.top_k import TopK
from allstep.compression.two_bit import TwoBit


def codec_from(text: str, name: str = "compress") -> Codec | None:
    """Return the codec of a text such as "2bit:0.5"; None for "none".

    name: of the setting, for the error.
    """
    found = codec_name(text, name)
    return None if found is None else CODECS[found.kind](found)


CODECS: dict[str, Callable[[CodecName], Codec]] = {
    "fp16": lambda found: Cast(found.text, torch.float16),
    "bf16": lambda found: Cast(found.text, torch.bfloat16),
    "int8": lambda found: Int8(),
    "2bit": lambda found: TwoBit(found.text, found.number),
    "1bit": lambda found: OneBit(found.text, found.number),
    "topk": lambda found: TopK(found.text, found.number or 0.0),
    "powersgd": lambda found: PowerSGD(found.text, int(found.number or 0)),
}
"""What makes a codec, by the kind of its name."""
