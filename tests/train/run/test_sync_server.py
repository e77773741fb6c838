"""`sync=server` has the bits of `allreduce` and of `share_weights`."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import allstep
from allstep.errors import ConfigError
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.config.check_config import check_config
from allstep.train.config.check_sync import check_hosts
from allstep.train.run.loop import train
from allstep.train.step.pushing import unused_servers
from allstep.train.watch.sync_line import servers_text, sync_line
from allstep.world import World
from support.allstep_command import run
from support.callback_events import opening
from support.hosts import SshHosts

# A batch of 51 leaves shares of 26 and 25 samples, and a short last batch.
SHORT = ["precision=float32", "epochs=1", "data.validation=50", "batch=51", "save.seconds=null"]
MODES = (["sync=allreduce"], ["sync=allreduce", "share_weights=true"], ["sync=server"])


def last_checkpoints(overrides: list[str]) -> list[checkpoint.Snapshot]:
    """Train in each mode; return the last checkpoints."""
    world, found = allstep.init(), []
    for number, mode in enumerate(MODES):
        out = Path.cwd() / str(number)
        train(read_config("digits", [*SHORT, *overrides, *mode]), world, out)
        if world.rank == 0:
            found.append(checkpoint.read(checkpoint.written(out / "checkpoints")[0]))
    return found


@pytest.mark.parametrize(
    "overrides", [["optimizer.momentum=0.9"], ["optimizer=lars", "optimizer.lr=1"]]
)
def test_a_server_has_the_bits_of_allreduce(ranks: Any, overrides: list[str]) -> None:
    allreduce, shared, server = ranks(2, last_checkpoints, overrides)[0]
    for other in (shared, server):
        assert other.state == allreduce.state
        for name, tensor in [*allreduce.weights.items(), *allreduce.optimizer.items()]:
            assert torch.equal((other.weights | other.optimizer)[name], tensor), name


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["sync=server", "share_weights=false"], "sync=server and share_weights=false exclude"),
        (["sync=server", "precision=float16"], "sync=server and precision=float16 exclude"),
        (["sync=server", "sync.correct=delay"], "sync.correct=delay corrects stale gradients"),
        (["sync=server", "sync.scale=false"], "sync.scale=false is for pushes of a share"),
    ],
)
def test_what_does_not_fit_is_an_error(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_config(read_config("digits", overrides), 2)


@pytest.mark.parametrize(
    ("hosts", "overrides"),
    [("aaab", ["optimizer=adamw"]), ("abc", ["optimizer=lars", "optimizer.lr=1"])],
)
def test_over_hosts_each_slice_has_one_server(ranks: Any, hosts: str, overrides: list[str]) -> None:
    """Uneven hosts: ranks 1 and 2 have no lane, so they serve nothing. Three hosts add as star."""
    found = ranks(
        len(hosts),
        last_checkpoints,
        overrides,
        hosts=list(hosts),
        env={"ALLSTEP_ALGORITHM": "star"},
    )
    allreduce, shared, server = found[0]
    for other in (shared, server):
        assert other.state == allreduce.state
        for name, tensor in [*allreduce.weights.items(), *allreduce.optimizer.items()]:
            assert torch.equal((other.weights | other.optimizer)[name], tensor), name


def compressed_runs(codecs: list[str]) -> list[checkpoint.Snapshot]:
    """Train without and with compression; return the last checkpoints."""
    world, found = allstep.init(), []
    for number, codec in enumerate(codecs):
        out = Path.cwd() / f"compressed {number}"
        overrides = [*SHORT, "optimizer.momentum=0.9", f"sync.compress={codec}"]
        train(read_config("digits", overrides), world, out)
        if world.rank == 0:
            found.append(checkpoint.read(checkpoint.written(out / "checkpoints")[0]))
    return found


def test_what_hosts_exchange_is_compressed(ranks: Any) -> None:
    """A codec that drops nothing gives the bits of allreduce; one that drops much still trains."""
    env = {"ALLSTEP_ALGORITHM": "star"}
    found = ranks(3, compressed_runs, ["none", "topk:100%", "2bit"], hosts=list("aab"), env=env)[0]
    plain, lossless, coarse = found
    for name, tensor in [*plain.weights.items(), *plain.optimizer.items()]:
        assert torch.equal((lossless.weights | lossless.optimizer)[name], tensor), name
    moved = [(plain.weights[n] - coarse.weights[n]).abs().max() for n in plain.weights]
    assert 0 < max(moved) < 1, "another series of weights, and no diverged one"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["sync=async", "sync.compress=bf16"], "sync.compress=bf16 compresses the gradients that"),
        (["sync.compress=2bit", "share_weights=false"], "sync.compress=2bit and share_weights="),
        (["sync.compress=2bit", "precision=float16"], "sync.compress=2bit and precision=float16"),
        (["sync.compress=2bit", "optimizer.noise=0.1"], "sync.compress=2bit and gradient noise"),
        (["sync.compress=3bit"], r"sync.compress.* a codec such as bf16 or 2bit \(unknown"),
    ],
)
def test_compression_that_does_not_fit_is_an_error(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_config(read_config("digits", overrides), 2)


def test_compression_on_one_host_is_an_error() -> None:
    config = read_config("digits", ["sync.compress=bf16"])
    check_hosts(config, World(0, 4, 0, 2, 0, 2, "h1", "allstep"))
    with pytest.raises(ConfigError, match="this run has one host, where workers share memory"):
        check_hosts(config, World(0, 4, 0, 4, 0, 1, "h1", "allstep"))


def test_pushes_over_several_hosts_are_not_supported_yet() -> None:
    world = World(0, 4, 0, 2, 0, 2, "h1", "allstep")
    for mode in ([], ["sync=server"]):
        check_hosts(read_config("digits", mode), world)
    with pytest.raises(ConfigError, match="on one host only so far, and this one has 2 of the 4"):
        check_hosts(read_config("digits", ["sync=async"]), world)


@pytest.mark.parametrize("mode", ["async", "stale:2", "local:8", "diloco:32"])
def test_one_host_is_no_several_parties(mode: str) -> None:
    world, config = World.alone(), read_config("digits", [f"sync={mode}", "sync.parties=hosts"])
    check_hosts(config, world)
    world = World(0, 2, 0, 2, 0, 1, "h1", "allstep")
    with pytest.raises(ConfigError, match="makes one party of the 2 workers of this host, and"):
        check_hosts(config, world)
    check_hosts(read_config("digits", ["sync=server", "sync.parties=hosts"]), world)


@pytest.mark.parametrize(
    ("hosts", "more", "expected"),
    [
        (("h1",) * 2, {"num_owners": 2}, "2 workers serve 4 MB each"),
        (("h1", "h1", "h2", "h2"), {"num_owners": 4}, "4 workers on 2 hosts serve 2 MB each"),
        (
            ("h1", "h1", "h2", "h2"),
            {"num_owners": 2, "undo_nbytes": 8},
            "2 workers on each host serve 4 MB each",
        ),
    ],
)
def test_the_banner_names_the_servers(
    hosts: tuple[str, ...], more: dict[str, int], expected: str
) -> None:
    config = read_config("digits", ["sync=server"]).resolved(len(hosts))
    made = opening(config=config, hosts=hosts, nbytes=8_000_000, **more)
    assert sync_line(config, len(hosts), servers_text(made)).endswith(f"updates it; {expected}")


def test_servers_that_are_not_used_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config("digits", ["sync=server"]).resolved(2)
    assert unused_servers(config) == []
    monkeypatch.setenv("ALLSTEP_SERVERS", "2")
    assert unused_servers(config)[0].startswith("2 servers of --servers: not used, since")


TRAIN = """
    import torch
    import allstep
    from pathlib import Path
    from allstep.train import read_config
    from allstep.train.checkpoint import write_and_read as checkpoint
    from allstep.train.run.loop import train

    world, found = allstep.init(), []
    for mode in ("allreduce", "server"):
        out = Path.cwd() / mode
        train(read_config("digits", [*OPTIONS, f"sync={mode}"]), world, out)
        if world.rank == 0:
            found.append(checkpoint.read(checkpoint.written(out / "checkpoints")[0]))
    if world.rank == 0:
        one, other = (each.weights | each.optimizer for each in found)
        print(sum(not torch.equal(one[name], other[name]) for name in one), len(one) == len(other))
"""


def test_a_server_between_real_hosts(two_hosts: SshHosts, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    options = [*SHORT, "batch=300", "optimizer=adamw"]
    path.write_text(textwrap.dedent(TRAIN).replace("OPTIONS", repr(options)))
    hosts = ["-H", "h1:1,h2:1", "--ssh", two_hosts.ssh]
    done = run("run", *hosts, sys.executable, str(path), cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    assert "0 True" in done.out
