"""Compressed pushes and pulls: worker's and server's code, without sockets, against serial models.

`Wired` hands each request to the code of a server's link, as the link would.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from allstep.compression import codec_from
from allstep.kvstore.links.all_links import Request
from allstep.kvstore.links.announced import Announced
from allstep.kvstore.links.pair import text_bytes
from allstep.kvstore.memory.key_memory import KeyShape, StoredKey
from allstep.kvstore.memory.slice_locks import ThreadLock
from allstep.kvstore.modes.key_wire import KeyWire
from allstep.kvstore.rules.codecs import Codecs, read_codecs
from allstep.kvstore.rules.headers import ANSWERED, OK, Header, Kind
from allstep.kvstore.rules.placement import PlacedPart
from allstep.kvstore.serving.link_thread import LinkThread
from allstep.kvstore.serving.served_store import ServedStore
from allstep.kvstore.updates.imported_class import optimizer_text
from allstep.kvstore.updates.optimizer_class import optimizer_class
from allstep.limits import read_limits

NUMEL, CUT = 100_003, 70_001
"""Two parts, of which one has two blocks."""


class Ends:
    """The server's end of a link: it receives what a test sends, and keeps what it answers."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.payload = torch.empty(0, dtype=torch.uint8)
        self.answers: list[tuple[Header, Tensor]] = []

    def receive_into(self, room: Tensor) -> None:
        room.copy_(self.payload)

    def send(self, header: Header, payload: Tensor) -> None:
        self.answers.append((header, payload.clone()))

    def ended(self) -> None:
        return None

    def shut(self) -> None: ...


class Wired:
    """A store on one server with a key of two parts, and a `KeyWire` for each worker or host."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, mode: str, senders: int, codecs: str, lr: float = 1.0
    ) -> None:
        monkeypatch.setattr("allstep.kvstore.serving.link_thread.Pair", Ends)
        monkeypatch.setattr(LinkThread, "_run", lambda _: None)
        self.served = ServedStore(Announced("nonce", 0, mode, 0, tuple(range(senders))))
        self.links: list[Any] = [
            LinkThread(self.served, party, HashStore(), read_limits()) for party in range(senders)
        ]
        spans = ((0, CUT), (CUT, NUMEL))
        parts = [PlacedPart(number, 0, span) for number, span in enumerate(spans)]
        for part in parts:
            text = json.dumps(["w", "float32", [part.span[1] - part.span[0]]])
            self.served.add(part.number, text)
            self.served.set_value(part.number, start()[slice(*part.span)])
        self.handle(0, Request(0, Header(Kind.CODECS), text_bytes(codecs)))
        if lr:
            chosen = optimizer_class(torch.optim.SGD, {"lr": lr})
            self.served.set_optimizer(optimizer_text(chosen, ""))
        form, self.nbytes = KeyShape("w", (NUMEL,), torch.float32, spans), 0
        self.wires, self.held = [], []
        for _ in range(senders):
            memory = memoryview(bytearray(form.place(1, 0).end))
            stored = StoredKey(form, memory, lambda _: ThreadLock(), 1)
            self.wires.append(KeyWire(stored, parts, read_codecs(codecs)))
            self.held.append(stored.flat)

    def handle(self, sender: int, request: Request) -> None:
        """Carry out a request and take its answer."""
        link = self.links[sender]
        ends: Ends = link._pair
        room = request.answer() if callable(request.answer) else request.answer
        payload = request.payload() if callable(request.payload) else request.payload
        ends.payload = torch.empty(0, dtype=torch.uint8) if payload is None else payload.clone()
        self.nbytes = ends.payload.numel()
        link._handle(request.header._replace(nbytes=self.nbytes))
        assert link._error is None, link._error
        if request.header.kind not in ANSWERED:
            return
        header, answer = ends.answers.pop()
        assert header.status == OK and room is not None
        self.nbytes += answer.numel()
        room.copy_(answer)
        if request.arrived is not None:
            request.arrived(header, room)

    def push(self, sender: int, gradient: Tensor) -> None:
        for index, span in enumerate(((0, CUT), (CUT, NUMEL))):
            self.handle(sender, self.wires[sender].push(index, lambda s=span: gradient[slice(*s)]))

    def pull(self, sender: int, number: int = 0) -> Tensor:
        out = torch.full((NUMEL,), torch.nan)
        for index in range(2):
            self.handle(sender, self.wires[sender].pull(index, out, number=number))
        self.wires[sender].has_pulled()
        return out

    @property
    def value(self) -> Tensor:
        return torch.cat([self.served.part(number).stored.flat for number in range(2)])


def start() -> Tensor:
    return gradient(99)


def gradient(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def quantized(text: str, values: Tensor) -> Tensor:
    """What arrives, part by part: a codec may look at the whole of a part."""
    codec = codec_from(text)
    assert codec is not None
    if text == "bf16":
        return values.bfloat16().float()
    assert text.startswith("2bit:")
    t = float(text.partition(":")[2])
    return torch.where(values >= t, t, torch.where(values <= -t, -t, 0.0))


@pytest.mark.parametrize("push", ["2bit:0.5", "bf16"])
@pytest.mark.parametrize("pull", ["2bit:0.25", "bf16", "none"])
def test_rounds_of_hosts(monkeypatch: pytest.MonkeyPatch, push: str, pull: str) -> None:
    """Sync: residuals of two hosts, their sum in order, one residual of pulls for both."""
    wired = Wired(monkeypatch, "sync", 2, f"{push}, pull {pull}", lr=0.5)
    for sender, wire in enumerate(wired.wires):
        wired.held[sender].copy_(start())
        wire.has_pulled()
    weights, held = start(), start()
    residuals = torch.zeros(2, NUMEL)
    for step in range(5):
        total = torch.zeros(NUMEL)
        for sender, residual in enumerate(residuals):
            residual += gradient(2 * step + sender)
            sent = quantized(push, residual)
            residual -= sent
            total = sent if not sender else total + sent
        weights = weights.sub(total, alpha=0.5)
        held = weights if pull == "none" else held + quantized(pull, weights - held)
        for sender in (1, 0):
            wired.push(sender, gradient(2 * step + sender))
        for sender in (0, 1):
            assert torch.equal(wired.pull(sender, step + 1), held)
    assert torch.equal(wired.value, weights)


PULLS = ["2bit", "2bit:0.01", "bf16", "fp16", "int8", "1bit", "topk:20%", "powersgd:4"]


@pytest.mark.parametrize("pull", PULLS)
def test_weights_do_not_drift(monkeypatch: pytest.MonkeyPatch, pull: str) -> None:
    """What a worker holds is what the server knows that it holds, bit by bit, after any pulls; and
    when pushes stop, it converges to the value: the residual is value - held.
    """
    wired = Wired(monkeypatch, "async", 2, f"none, pull {pull}", lr=0.02)
    # `init` is not compressed.
    assert torch.equal(wired.pull(0), start())
    for step in range(30):
        wired.push(step % 2, gradient(step))
        if step % 3:
            out = wired.pull(0)
            assert torch.equal(out, wired.held[0])
    assert torch.equal(wired.pull(1), wired.value)
    # Differences of whole values follow, whatever the other worker has pulled.
    wired.push(0, gradient(77))
    before = (wired.value - wired.held[0]).norm()
    for _ in range(60):
        wired.pull(0)
    known = torch.cat([wired.served.part(n)._held._held[0] for n in range(2)])  # type: ignore[union-attr]
    assert torch.equal(known, wired.held[0])
    error = (wired.value - wired.held[0]).norm()
    # Scales of a block shrink with it, and slowly for its largest values.
    bounds = {"powersgd:4": 0.9, "1bit": 0.1, "2bit": 0.05, "2bit:0.01": 0.2}
    assert error < bounds.get(pull, 1e-3) * before
    if pull == "2bit:0.01":
        assert (wired.value - wired.held[0]).abs().max() <= 0.0101


def test_bytes_of_a_push_and_of_a_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    wired = Wired(monkeypatch, "async", 1, "2bit:0.5, pull bf16")
    part = CUT * 4
    wired.handle(0, wired.wires[0].push(0, lambda: gradient(0)[:CUT]))
    assert abs(wired.nbytes - part / 16) < 8
    wired.pull(0)
    wired.handle(0, wired.wires[0].pull(0, torch.empty(NUMEL)))
    assert abs(wired.nbytes - part / 2) < 8


def test_sums_without_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's value replaces the last one, so the sum is sent, with error feedback."""
    wired = Wired(monkeypatch, "sync", 1, "none, pull 2bit:0.5", lr=0)
    wired.wires[0].has_pulled()
    residual = torch.zeros(NUMEL)
    for step in range(4):
        wired.push(0, gradient(step))
        residual += gradient(step)
        sent = quantized("2bit:0.5", residual)
        residual -= sent
        assert torch.equal(wired.pull(0, step + 1), sent)


@pytest.mark.parametrize("pull", ["2bit:0.5", "2bit", "bf16"])
def test_a_diverged_run_is_noticed(monkeypatch: pytest.MonkeyPatch, pull: str) -> None:
    wired = Wired(monkeypatch, "async", 1, f"none, pull {pull}")
    wired.pull(0)
    wired.push(0, torch.full((NUMEL,), torch.inf))
    for _ in range(2):
        assert wired.pull(0).isnan().all()


def test_the_copy_of_a_party_that_is_gone_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    wired = Wired(monkeypatch, "async", 2, "none, pull bf16")
    for sender in (0, 1):
        wired.pull(sender)
    wired.served.leave(1, in_order=True)
    held: Any = wired.served.part(0)._held
    assert list(held._held) == [0]


@pytest.mark.parametrize("text", ["none", "2bit:0.5", "none, pull 1bit", "bf16, pull 2bit:0.1"])
def test_codecs_as_text(text: str) -> None:
    assert read_codecs(text).text == text
    assert read_codecs(text).of(torch.int64) == Codecs()
