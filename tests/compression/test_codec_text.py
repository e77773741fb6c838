"""Texts of codecs, and the one line that a wrong one gets."""

import pytest

from allstep.compression import codec_from
from allstep.errors import ConfigError

NORMAL = {
    "fp16": "fp16",
    " BF16 ": "bf16",
    "int8": "int8",
    "2bit:0.50": "2bit:0.5",
    "2bit": "2bit",
    "2bit:0.123456789": "2bit:0.123456789",
    "topk:1.23456789%": "topk:1.23456789%",
    "1bit": "1bit",
    "1bit:0": "1bit:0",
    "topk:1.0%": "topk:1%",
    "topk:0.1%": "topk:0.1%",
    "powersgd:4": "powersgd:4",
}
WRONG = {
    "fp61": "unknown compression; did you mean 'fp16'?",
    "2bits:1": "unknown compression; did you mean '2bit'?",
    "zip": "unknown compression; known are: 1bit, 2bit, bf16, fp16, int8, none, powersgd, topk",
    "none:1": "unknown compression; did you mean 'none'?",
    "int8:3": "int8 takes no number; write int8",
    "bf16:": "bf16 takes no number; write bf16",
    "2bit:x": "expected 2bit, or 2bit:t with MXNet's threshold t above 0, such as 2bit:0.5",
    "2bit:nan": "expected 2bit, or 2bit:t with MXNet's threshold t above 0, such as 2bit:0.5",
    "2bit:0": "the threshold 0 is not above 0",
    "2bit:-1": "the threshold -1 is not above 0",
    "1bit:": "expected 1bit, or 1bit:t with MXNet's threshold t, such as 1bit:0",
    "topk": "expected topk:P% with a percentage P above 0 and at most 100, such as topk:1%",
    "topk:0.01": "expected topk:P% with a percentage",
    "topk:0%": "expected topk:P% with a percentage",
    "topk:101%": "expected topk:P% with a percentage",
    "powersgd:0": "expected powersgd:r with a rank r from 1 to 1024, such as powersgd:4",
    "powersgd:1.5": "expected powersgd:r with a rank",
}


@pytest.mark.parametrize(("text", "normal"), NORMAL.items())
def test_known_texts(text: str, normal: str) -> None:
    codec = codec_from(text)
    assert codec is not None and codec.text == normal
    again = codec_from(codec.text)
    assert again is not None and again.text == normal


def test_none_is_no_codec() -> None:
    assert codec_from("none") is None


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_a_wrong_text_gets_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        codec_from(text, "sync.compress")
    assert str(caught.value).startswith(f"sync.compress={text}: {message}")
    assert "\n" not in str(caught.value)
