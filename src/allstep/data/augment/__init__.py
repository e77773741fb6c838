"""Operations on images, one idea per file.

`operation` defines what an operation is; `docs/augmentation.md` lists all of them.
"""

from allstep.data.augment.color import Brightness, ColourJitter, Contrast, Hue, Saturation
from allstep.data.augment.erase import Cutout, Erase
from allstep.data.augment.flip import Flip
from allstep.data.augment.frame import CentreCrop, RandomResizedCrop, Resize
from allstep.data.augment.operation import Operation
from allstep.data.augment.pad_and_crop import PadAndCrop
from allstep.data.augment.rotate import Rotate

__all__ = [
    "Brightness",
    "CentreCrop",
    "ColourJitter",
    "Contrast",
    "Cutout",
    "Erase",
    "Flip",
    "Hue",
    "Operation",
    "PadAndCrop",
    "RandomResizedCrop",
    "Resize",
    "Rotate",
    "Saturation",
]
