"""A store on a server without sockets: threads call what links would."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from allstep.errors import CollectiveMismatch, CommError, PeerLost, UserError
from allstep.kvstore.links.announced import Announced
from allstep.kvstore.serving.served_store import ServedStore
from allstep.kvstore.updates.imported_class import imported_optimizer, optimizer_text
from allstep.kvstore.updates.optimizer_class import optimizer_class

SGD = optimizer_text(optimizer_class(torch.optim.SGD, {"lr": 1.0}), "")


def store(mode: str, hosts: tuple[int, ...], rounds: int = 0, numel: int = 4) -> ServedStore:
    """Return a store with part 0, which is zero."""
    made = ServedStore(Announced("nonce", 0, mode, rounds, hosts))
    made.add(0, json.dumps(["w", "float32", [numel]]))
    made.set_value(0, torch.zeros(numel))
    return made


def value(served: ServedStore, party: int = 0) -> Tensor:
    part = served.part(0)
    found = torch.empty(part.form.numel)
    part.copy(party, found)
    return found


def together(*acts: Callable[[], Any]) -> list[Any]:
    """Call all at once, each in a thread; return results or errors."""

    def outcome(act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(outcome, acts))


def contribute(served: ServedStore, party: int, number: float) -> None:
    served.room(party, 0).fill_(number)
    served.contribute(party, 0)


def test_sums_are_added_in_order_of_hosts_whichever_comes_first() -> None:
    """In float32, (1e8 + -1e8) + 1 is 1, and (1e8 + 1) + -1e8 is 0."""
    served = store("sync", (0, 1, 2))
    for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 2, 0)], 1):
        for host in order:
            contribute(served, host, (1e8, -1e8, 1.0)[host])
        served.wait_for_round(0, number)
        assert value(served).tolist() == [1.0] * 4


def test_a_pull_waits_for_its_round_and_a_party_that_is_gone_ends_it() -> None:
    served = store("sync", (0, 0, 1))
    served.set_optimizer(SGD)
    contribute(served, 0, 1.0)

    def late() -> None:
        contribute(served, 2, 2.0)

    timer = threading.Timer(0.2, late)
    timer.start()
    served.wait_for_round(0, 1)
    assert value(served).tolist() == [-3.0] * 4
    contribute(served, 1, 1.0)
    threading.Timer(0.2, lambda: served.leave(2, in_order=False)).start()
    with pytest.raises(PeerLost, match=r"pull of key 'w': lost rank 2 \(its link has ended\)"):
        served.wait_for_round(0, 2)
    with pytest.raises(CommError, match="host 0 contributes to a round twice"):
        contribute(served, 0, 1.0)


def test_async_applies_each_push_once() -> None:
    served = store("async", (0, 0, 1, 1))
    with pytest.raises(UserError, match="has no optimizer yet"):
        served.push(0, 0, torch.ones(4))
    served.set_optimizer(SGD)

    def push(party: int) -> None:
        for _ in range(50):
            served.push(party, 0, torch.full((4,), -1.0))

    assert together(*(lambda p=party: push(p) for party in range(4))) == [None] * 4
    assert value(served).tolist() == [200.0] * 4
    assert served.part(0).version == 200


@pytest.mark.parametrize("rounds", [1, 2])
def test_no_gradient_is_older_than_the_bound(rounds: int) -> None:
    """Parties of very different speed; a push must never be applied too late."""
    served = store("stale", (0, 1, 1), rounds)
    served.set_optimizer(SGD)
    part = served.part(0)

    def work(party: int) -> None:
        random, out = Random(party), torch.empty(4)
        for _ in range(40 // (party + 1)):
            part.copy(party, out)
            threading.Event().wait(random.random() * 0.002 * (1 + 4 * party))
            served.push(party, 0, torch.ones(4))
        served.leave(party, in_order=True)

    assert together(*(lambda p=party: work(p) for party in range(3))) == [None] * 3
    assert part.version == 40 + 20 + 13
    assert part.max_age <= rounds * 3


def test_a_party_in_a_barrier_is_not_waited_for() -> None:
    served = store("stale", (0, 1), 1)
    served.set_optimizer(SGD)

    def push() -> str:
        for _ in range(5):
            served.push(0, 0, torch.ones(4))
            part.copy(0, out)
        return barrier(0)

    def barrier(party: int) -> str:
        served.rest(party)
        served.collect(party, "barrier", "", needs_all=False)
        return served.wake(party)

    part, out = served.part(0), torch.empty(4)
    # The gradient of party 1 is older than 2 updates then.
    assert together(push, lambda: barrier(1)) == ["[]", "[0]"]


def test_rows_of_a_part_that_cuts_them() -> None:
    """Elements 4 to 10 of a matrix with rows of 3: the end of row 1, row 2, the start of row 3."""
    served = ServedStore(Announced("nonce", 0, "async", 0, (0,)))
    served.add(0, json.dumps(["w", "float32", [7, 1], 4, 3]))
    served.set_value(0, torch.zeros(7))
    adam = optimizer_class(torch.optim.Adam, {"lr": 1.0})
    served.set_optimizer(optimizer_text(adam, ""))
    part = served.part(0)

    def message(rows: list[int], values: list[float]) -> Tensor:
        return torch.cat(
            [torch.tensor(rows).view(torch.uint8), torch.tensor(values).view(torch.uint8)]
        )

    served.push(0, 0, part.rows_in(message([1, 3], [1.0, 2.0, 3.0, 4.0]), 2))
    assert value(served).sign().tolist() == [-1, -1, 0, 0, 0, -1, -1]
    values, version = part.copy_rows(0, torch.tensor([2, 3]))
    assert torch.equal(values, value(served)[2:]) and version == 1
    # A push without rows of this part counts: the step of Adam is that of the key.
    served.push(0, 0, part.rows_in(torch.empty(0, dtype=torch.uint8), 0))
    assert {name: float(found.max()) for name, _, found in served.state(0)}["step"] == 2
    for rows, numel, text in (
        ([1], 3, "1 rows with 20 bytes, expected 16"),
        ([0], 2, "found rows that part"),
        ([3, 1], 4, "found rows that part"),
    ):
        with pytest.raises(CommError, match=text):
            part.rows_in(message(rows, [1.0] * numel), len(rows))


def test_calls_of_all_parties() -> None:
    served = store("async", (0, 1, 1))

    def call(party: int, what: str, *, needs_all: bool = True) -> Callable[[], str]:
        return lambda: served.collect(party, what, f"text {party}", needs_all=needs_all)

    texts = ["text 0", "text 1", "text 2"]
    assert {*together(*(call(p, "init") for p in range(3)))} == {json.dumps(texts)}
    for error in together(call(0, "init"), call(1, "barrier"), call(2, "init")):
        assert isinstance(error, CollectiveMismatch)
        assert "rank 0 calls init and rank 1 calls barrier" in str(error)
    assert {*together(*(call(p, "init") for p in range(3)))} == {json.dumps(texts)}
    served.leave(1, in_order=True)
    found = together(call(0, "barrier", needs_all=False), call(2, "barrier", needs_all=False))
    assert {*found} == {json.dumps(["text 0", None, "text 2"])}
    for error in together(call(0, "init"), call(2, "init")):
        assert isinstance(error, PeerLost) and error.peer == 1
        assert "kvstore, init: lost rank 1 (has closed its store)" in str(error)
    assert not served.is_over
    served.leave(0, in_order=True)
    served.leave(2, in_order=False)
    assert served.is_over


def test_a_loss_ends_a_call_that_waits() -> None:
    served = store("async", (0, 1))
    threading.Timer(0.2, lambda: served.leave(1, in_order=False)).start()
    with pytest.raises(PeerLost, match="lost rank 1"):
        served.collect(0, "init", "", needs_all=True)
    assert json.loads(served.collect(0, "barrier", "", needs_all=False)) == ["", None]


def test_the_state_of_an_optimizer_stays_when_its_settings_change() -> None:
    served = store("async", (0,))

    def use(**settings: Any) -> None:
        served.set_optimizer(optimizer_text(optimizer_class(torch.optim.SGD, settings), ""))

    use(lr=1.0, momentum=0.5)
    assert served.state(0) == []
    served.push(0, 0, torch.ones(4))
    use(lr=0.5, momentum=0.5)
    ((name, kind, momentum),) = served.state(0)
    assert (name, kind, momentum.tolist()) == ("momentum_buffer", "tensor", [1.0] * 4)
    room, done = served.put_state(0, 0)
    room.fill_(4.0)
    done()
    served.push(0, 0, torch.ones(4))
    assert value(served).tolist() == [-1.0 - 0.5 * 3.0] * 4


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        ("__main__", "Mine", "is defined in the script itself, which servers do not run; move"),
        ("a.b", "f.<locals>.Mine", "is defined in the script itself"),
        ("no_such_module", "Mine", r"cannot import no_such_module.Mine \(ModuleNotFoundError"),
        ("torch.optim", "Mine", r"cannot import torch.optim.Mine \(AttributeError"),
        ("torch.nn", "Linear", "is no torch optimizer on the server"),
    ],
)
def test_classes_that_a_server_cannot_use(module: str, name: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        imported_optimizer(json.dumps([module, name, {}, False, ""]))


def test_a_class_next_to_the_script(tmp_path: Any) -> None:
    (tmp_path / "kv_optim.py").write_text("import torch\nclass Mine(torch.optim.SGD): pass\n")
    text = json.dumps(["kv_optim", "Mine", {"lr": 0.5, "x": [1, 2]}, True, str(tmp_path)])
    found = imported_optimizer(text)
    assert (found.cls.__name__, found.settings) == ("Mine", {"lr": 0.5, "x": (1, 2)})


def test_a_part_of_another_server() -> None:
    with pytest.raises(CommError, match="part 7 is not on this server"):
        store("async", (0,)).part(7)
