"""Compressors."""

import pytest
import torch

from allstep.torch import Compression
from allstep.torch.compression import Compressor


@pytest.mark.parametrize(
    ("compressor", "dtype"), [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)]
)
def test_casts_what_is_floating_point(compressor: type[Compressor], dtype: torch.dtype) -> None:
    for original in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        sent, ctx = compressor.compress(torch.tensor([1.5], dtype=original))
        assert sent.dtype == dtype
        back = compressor.decompress(sent, ctx)
        assert (back.dtype, back.item()) == (original, 1.5)
    whole = torch.tensor([3])
    sent, ctx = compressor.compress(whole)
    assert sent is whole and compressor.decompress(sent, ctx) is whole


def test_none_changes_nothing() -> None:
    tensor = torch.ones(1)
    sent, ctx = Compression.none.compress(tensor)
    assert sent is tensor and ctx is None and Compression.none.decompress(sent, ctx) is tensor


def test_the_base_class_does_nothing() -> None:
    with pytest.raises(NotImplementedError):
        Compressor.compress(torch.ones(1))
    with pytest.raises(NotImplementedError):
        Compressor.decompress(torch.ones(1), None)
