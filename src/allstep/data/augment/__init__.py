"""Operations on pictures, one idea per file; `operation` says what an operation is, `docs/augmentation.md` has the table of them."""

from allstep.data.augment.frame import CentreCrop, RandomResizedCrop, Resize

__all__ = ["CentreCrop", "RandomResizedCrop", "Resize"]
