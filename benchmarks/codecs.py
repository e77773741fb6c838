"""What do the codecs of `allstep.compression` cost, and on which links do they pay?

    python benchmarks/codecs.py [--megabytes 32] [--rounds 9] [--json FILE] [codec ...]

CPU milliseconds on one core for a tensor of normal random numbers: encode, decode, and encode with
error feedback. For `2bit`, `1bit` and `topk` the same with feedback in plain torch, on the whole
tensor. The rounds go through all of these in turn, so that a busy minute affects all; the least
time of each is shown.

A codec pays one way on a link on which the bytes that it saves take longer than its encoding with
feedback and its decoding: the last column is the speed of that link.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from allstep.compression import ErrorFeedback, codec_from, decode, encode
from allstep.compression.blocks import Codec

CODECS = ("fp16", "bf16", "int8", "2bit:0.5", "1bit", "1bit:0", "topk:1%", "powersgd:4")


@dataclass(frozen=True)
class Measured:
    """One codec: CPU milliseconds, and bytes sent. plain: None where there is no plain version."""

    codec: str
    nbytes: int
    encode: float
    decode: float
    feedback: float
    plain: float | None

    def link(self, nbytes: int) -> float:
        """Return the speed in Gbit/s of the link on which it neither pays nor costs."""
        return (nbytes - self.nbytes) * 8e-9 / ((self.feedback + self.decode) / 1000)


def plain_2bit(residual: Tensor, gradient: Tensor) -> Tensor:
    """As a formula: booleans, floats, a table of weights."""
    residual.add_(gradient)
    positive, negative = residual >= 0.5, residual <= -0.5
    residual.sub_(positive.float() - negative.float(), alpha=0.5)
    codes = (positive.int() * 3 + negative.int() * 2).view(-1, 4)
    return (codes * torch.tensor([64, 16, 4, 1])).sum(1).to(torch.uint8)


def plain_1bit(residual: Tensor, gradient: Tensor) -> Tensor:
    residual.add_(gradient)
    positive, scale = residual > 0, residual.abs().mean()
    residual.sub_(torch.where(positive, scale, -scale))
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])
    return (positive.int().view(-1, 8) * weights).sum(1).to(torch.uint8)


def plain_top_k(residual: Tensor, gradient: Tensor) -> Tensor:
    residual.add_(gradient)
    places = torch.topk(residual.abs(), residual.numel() // 100, sorted=False).indices
    values = residual[places]
    residual[places] = 0
    return values


PLAIN = {"2bit": plain_2bit, "1bit": plain_1bit, "topk": plain_top_k}


def main() -> int:
    options = parsed()
    torch.set_num_threads(1)
    numel = options.megabytes * (1 << 20) // 4
    found = measure(options.codecs, torch.randn(numel) * 0.3, options.rounds)
    print(f"{options.megabytes} MB of float32, one core, CPU ms")
    print(
        f"{'':12}{'MB sent':>9}{'encode':>9}{'decode':>9}{'feedback':>10}{'ns/value':>10}", end=""
    )
    print(f"{'plain':>9}{'pays below':>14}")
    for each in found:
        print(row(each, numel))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in found]))
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", default=CODECS)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(texts: list[str], gradient: Tensor, rounds: int) -> list[Measured]:
    """Measure all codecs, one after the other in each round."""
    codecs = [codec for text in texts if (codec := codec_from(text)) is not None]
    calls = [calls_of(codec, gradient) for codec in codecs]
    least: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for codec, named in zip(codecs, calls, strict=True):
            for name, call in named.items():
                spent = cpu_ms(call)
                least[codec.text, name] = min(spent, least.get((codec.text, name), spent))
    return [
        Measured(
            codec.text,
            encode(codec, gradient).numel(),
            *(least[codec.text, name] for name in ("encode", "decode", "feedback")),
            least.get((codec.text, "plain")),
        )
        for codec in codecs
    ]


def calls_of(codec: Codec, gradient: Tensor) -> dict[str, Callable[[], object]]:
    encoded, out = encode(codec, gradient), torch.empty_like(gradient)
    feedback, residual = ErrorFeedback(codec), torch.zeros_like(gradient)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(codec, gradient, encoded),
        "decode": lambda: decode(codec, encoded, out),
        "feedback": lambda: feedback.encode(gradient, encoded),
    }
    plain = PLAIN.get(codec.text.partition(":")[0])
    if plain is not None:
        calls["plain"] = lambda: plain(residual, gradient)
    return calls


def cpu_ms(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1000


def row(each: Measured, numel: int) -> str:
    plain = "-" if each.plain is None else f"{each.plain:.1f}"
    speed = each.link(4 * numel)
    return (
        f"{each.codec:12}{each.nbytes / (1 << 20):9.2f}{each.encode:9.1f}{each.decode:9.1f}"
        f"{each.feedback:10.1f}{each.feedback / numel * 1e6:10.2f}{plain:>9}{speed:8.1f} Gbit/s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
