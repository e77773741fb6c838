"""Each codec against a serial model of it, and the properties that all of them share."""

import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from allstep.compression import ErrorFeedback, codec_from, decode, encode, encoded_nbytes
from allstep.compression.blocks import BLOCK, Codec
from allstep.compression.top_k import largest

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ("fp16", "bf16", "int8", "2bit", "2bit:0.5", "1bit", "1bit:0.25", "topk:3%", "powersgd:2")
SIZES = st.integers(0, 200) | st.sampled_from([BLOCK, BLOCK + 5])
SEEDS = st.integers(0, 2**32 - 1)
FLOATS = st.lists(st.floats(-100, 100, width=32), max_size=150)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(text: str) -> Codec:
    codec = codec_from(text)
    assert codec is not None
    return codec


def values(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def there_and_back(codec: Codec, given: Tensor) -> Tensor:
    encoded = encode(codec, given)
    assert encoded.numel() == encoded_nbytes(codec, given.numel()) and encoded.numel() % 4 == 0
    return decode(codec, encoded, torch.full_like(given, torch.nan))


def mxnet_2bit(gradient: list[float], residual: list[float], threshold: float) -> bytes:
    """MXNet's quantize_2bit: 16 values in a float, two bits each, masks by place in the byte."""
    positive, negative = (0xC0, 0x30, 0x0C, 0x03), (0x80, 0x20, 0x08, 0x02)
    packed = bytearray(4 * math.ceil(len(gradient) / 16))
    for place, each in enumerate(gradient):
        residual[place] += each
        at = place // 16 * 4 + place % 16 // 4
        if residual[place] >= threshold:
            packed[at] |= positive[place % 4]
            residual[place] -= threshold
        elif residual[place] <= -threshold:
            packed[at] |= negative[place % 4]
            residual[place] += threshold
    return bytes(packed)


def mxnet_1bit(gradient: list[float], residual: list[float], threshold: float) -> bytes:
    """MXNet's quantize_1bit: 32 values in a float."""
    packed = bytearray(4 * math.ceil(len(gradient) / 32))
    for place, each in enumerate(gradient):
        residual[place] += each
        if residual[place] > threshold:
            packed[place // 32 * 4 + place % 32 // 8] |= 0x80 >> place % 8
            residual[place] -= 1
        else:
            residual[place] += 1
    return bytes(packed)


# Numbers whose sums are exact, so that a serial model in float64 has the same bits.
EIGHTHS = st.lists(st.lists(st.integers(-20, 20).map(lambda n: n / 8), min_size=70, max_size=70))


@pytest.mark.parametrize(
    ("text", "model", "threshold"),
    [("2bit:0.5", mxnet_2bit, 0.5), ("2bit:0.75", mxnet_2bit, 0.75), ("1bit:0.5", mxnet_1bit, 0.5)],
)
@given(EIGHTHS, st.integers(0, 70))
@settings(max_examples=25)
def test_bits_and_residual_are_mxnets(
    text: str, model: Any, threshold: float, steps: list[bytes], numel: int
) -> None:
    feedback, residual = ErrorFeedback(made(text)), [0.0] * numel
    for gradient in ([(byte - 128) / 64 for byte in step] for step in steps):
        encoded = feedback.encode(torch.tensor(gradient[:numel]))
        assert bytes(encoded.numpy()) == model(gradient[:numel], residual, threshold)
        assert feedback.residual is not None and feedback.residual.tolist() == residual


@given(SIZES, SEEDS)
@settings(max_examples=12)
def test_a_threshold_is_met_exactly(numel: int, seed: int) -> None:
    """The float next below the threshold is not sent, whatever the threshold is."""
    threshold = float(values(1, seed).abs() + 1e-3)
    at = torch.tensor(threshold)
    below = torch.nextafter(at, torch.tensor(0.0))
    given = torch.stack([at, below, -at, -below]).repeat(numel // 4 + 1)
    expected = torch.tensor([threshold, 0, -threshold, 0]).repeat(numel // 4 + 1)
    codec = made(f"2bit:{at.item()!r}")
    assert torch.equal(there_and_back(codec, given), expected)


def by_blocks(given: Tensor, model: Any) -> Tensor:
    parts = [model(part) for part in given.split(BLOCK)] if given.numel() else []
    return torch.cat(parts) if parts else given


def model_int8(part: Tensor) -> Tensor:
    scale = part.abs().max() / 127
    return (part / scale).round() * scale if scale else torch.zeros_like(part)


def model_1bit(part: Tensor) -> Tensor:
    return torch.where(part > 0, 1.0, -1.0) * part.abs().mean()


def model_2bit(part: Tensor) -> Tensor:
    """Ternary weights: the values above 0.7 of the mean become the mean of these."""
    chosen = part.abs() >= 0.7 * part.abs().mean()
    return part.sign() * chosen * part.abs()[chosen].mean()


MODELS = {
    "fp16": lambda given: given.half().float(),
    "bf16": lambda given: given.bfloat16().float(),
    "int8": lambda given: by_blocks(given, model_int8),
    "1bit": lambda given: by_blocks(given, model_1bit),
    "2bit": lambda given: by_blocks(given, model_2bit),
}


@pytest.mark.parametrize("text", MODELS)
@given(SIZES, SEEDS)
@settings(max_examples=12)
def test_what_arrives_is_the_models(text: str, numel: int, seed: int) -> None:
    given = values(numel, seed)
    torch.testing.assert_close(
        there_and_back(made(text), given), MODELS[text](given), rtol=2e-6, atol=0
    )


@pytest.mark.parametrize("text", ["fp16", "bf16", "int8", "topk:50%"])
@given(FLOATS)
@settings(max_examples=15)
def test_errors_are_small(text: str, numbers: list[float]) -> None:
    given = torch.tensor(numbers)
    error = (there_and_back(made(text), given) - given).abs()
    largest = given.abs().max() if numbers else torch.tensor(0.0)
    if text == "topk:50%":
        assert error.count_nonzero() <= len(numbers) // 2
        return
    bound = {"fp16": given.abs() / 2**11 + 1e-7, "bf16": given.abs() / 2**8 + 1e-38}
    assert (error <= bound.get(text, largest / 254 * (1 + 1e-5))).all()


@given(SIZES, SEEDS, st.sampled_from(["0.001%", "1%", "3%", "40%", "100%"]))
@settings(max_examples=15)
def test_topk_sends_the_largest(numel: int, seed: int, percent: str) -> None:
    given = values(numel, seed)
    codec = made(f"topk:{percent}")
    found = there_and_back(codec, given)
    for part, sent in zip(given.split(BLOCK), found.split(BLOCK), strict=True):
        number = codec.num_sent(part.numel()) if part.numel() else 0  # type: ignore[attr-defined]
        chosen = sent.nonzero().view(-1)
        assert torch.equal(sent[chosen], part[chosen])
        expected = torch.topk(part.abs(), number).values
        torch.testing.assert_close(part[chosen].abs().sort(descending=True).values, expected)


def test_topk_of_equal_and_of_few_values() -> None:
    """The sample says nothing about the rest here: the limit lets too few or too many through."""
    ones = torch.ones(BLOCK)
    assert there_and_back(made("topk:1%"), ones).sum() == math.ceil(BLOCK / 100)
    few = torch.zeros(BLOCK)
    few[1::16][:700] = 1.0
    assert largest(few, 656).unique().numel() == 656
    few[0::16] = 2.0
    assert (few[largest(few, 4096)] == 2).all()


def test_powersgd_keeps_a_matrix_of_its_rank() -> None:
    left, right = values(200, 1).view(100, 2), values(200, 2).view(100, 2)
    given = (left @ right.t()).reshape(-1)
    torch.testing.assert_close(there_and_back(made("powersgd:2"), given), given)
    rest = given - there_and_back(made("powersgd:1"), given)
    best = torch.linalg.svdvals(given.view(100, 100))[1]
    assert rest.norm() == pytest.approx(best.item(), rel=0.01)


@pytest.mark.parametrize("text", TEXTS)
@given(SIZES, SEEDS, st.sampled_from([1e-3, 1.0, 30.0]))
@settings(max_examples=6)
def test_what_was_sent_and_the_residual_are_the_gradients(
    text: str, numel: int, seed: int, scale: float
) -> None:
    codec = made(text)
    feedback, total, sent = ErrorFeedback(codec), torch.zeros(numel), torch.zeros(numel)
    for step in range(4):
        gradient = values(numel, seed + step, scale)
        before = gradient.clone()
        sent += feedback.quantize(gradient)
        total += gradient
        assert torch.equal(gradient, before)
    assert feedback.residual is not None
    torch.testing.assert_close(sent + feedback.residual, total, rtol=1e-4, atol=2e-6 + 1e-5 * scale)


@pytest.mark.parametrize("text", ["2bit", "2bit:0.5", "1bit", "topk:2%", "powersgd:1"])
def test_feedback_makes_coarse_codecs_converge(text: str) -> None:
    """Least squares by gradient descent: with feedback the minimum is reached, without it not."""
    target = values(256, 3)

    def distance(uses_feedback: bool) -> float:
        weights = torch.zeros(256)
        codec = made(text)
        feedback = ErrorFeedback(codec)
        for step in range(800):
            gradient = (weights - target) * (0.7 + 0.6 * (step % 2))
            got = feedback.quantize(gradient) if uses_feedback else there_and_back(codec, gradient)
            weights -= 0.02 * got
        return float((weights - target).norm() / target.norm())

    assert distance(True) < 0.1
    if text == "2bit:0.5":
        assert distance(False) > distance(True)


@pytest.mark.parametrize("text", ["fp16", "bf16", "int8", "2bit", "1bit", "topk:3%", "powersgd:2"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_and_leaves_no_trace(text: str, bad: float) -> None:
    feedback = ErrorFeedback(made(text))
    gradient = values(300, 0)
    gradient[7] = bad
    assert not feedback.quantize(gradient)[7].isfinite()
    for step in range(3):
        assert feedback.quantize(values(300, step)).isfinite().all()


def test_the_sign_bit_of_a_block_end_is_its_own() -> None:
    """Blocks do not share bytes, and MXNet's bits of a long tensor are those of its blocks."""
    given = values(BLOCK + 40, 5)
    encoded = encode(made("2bit:0.5"), given)
    expected = mxnet_2bit(given.tolist(), [0.0] * given.numel(), 0.5)
    assert bytes(encoded.numpy()) == expected
    assert struct.unpack("<B", expected[:1])[0] == int(encoded[0])


WRONG = {
    "double": lambda codec: encode(codec, torch.ones(3, dtype=torch.float64)),
    "matrix": lambda codec: encode(codec, torch.ones(3, 3)),
    "strided": lambda codec: encode(codec, torch.ones(6)[::2]),
    "short": lambda codec: decode(codec, torch.zeros(3, dtype=torch.uint8), torch.ones(3)),
    "long out": lambda codec: encode(codec, torch.ones(3), torch.zeros(8, dtype=torch.uint8)),
    "floats": lambda codec: decode(codec, torch.zeros(4), torch.ones(3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_fit(name: str) -> None:
    with pytest.raises(ValueError, match=r"found torch\..*(take flat|is 4 bytes of uint8)"):
        WRONG[name](made("2bit:0.5"))


def test_a_residual_is_for_one_tensor() -> None:
    feedback = ErrorFeedback(made("int8"))
    feedback.encode(torch.ones(4))
    with pytest.raises(ValueError, match="a gradient of 5 elements after one of 4; use one"):
        feedback.encode(torch.ones(5))
