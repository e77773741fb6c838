"""`allstep run --replace-gloo`: unmodified torch.distributed programs compute on backend "allstep",
to the bits of Gloo."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from allstep.errors import ConfigError
from allstep.launch.gloo import FOLDER, LINE, with_gloo_replaced
from support.allstep_command import run
from support.ranks import Ranks

SCRIPTS = Path(__file__).parent.parent / "gloo_scripts"


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("script", ["plain_ddp.py", "lightning_ddp.py", "accelerate_ddp.py"])
def test_the_weights_have_the_bits_of_gloo(tmp_path: Path, script: str) -> None:
    """On 2 ranks. The timeline, which only our groups write, shows which backend computed."""
    found = []
    for flags in ([], ["--replace-gloo"]):
        weights, timeline = tmp_path / f"{len(flags)}.pt", tmp_path / f"{len(flags)}.json"
        command = ["run", "-np", "2", *flags, "python", SCRIPTS / script, weights]
        done = run(*command, cwd=tmp_path, env={"ALLSTEP_TIMELINE": str(timeline)})
        assert done.code == 0, done.err
        assert done.err.count(LINE) == len(flags)
        found.append(torch.load(weights))
    gloo, ours = found
    assert gloo.keys() == ours.keys()
    different = [name for name in gloo if not torch.equal(gloo[name], ours[name])]
    assert not different
    assert not (tmp_path / "0.json").exists()
    events = json.loads((tmp_path / "1.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert {event["pid"] for event in events if event["name"] == "all_reduce"} == {0, 1}


@pytest.mark.parametrize("backend", ["gloo", None, "cpu:gloo,cuda:nccl", "allstep"])
def test_every_group_of_a_program_is_ours_and_has_the_name_it_asked_for(
    ranks: Ranks, backend: str | None
) -> None:
    def work(backend: str | None, folder: str) -> list[Any]:
        import torch.distributed as dist

        from support.default_group import joined

        sys.path.insert(0, folder)
        import allstep_replace_gloo

        allstep_replace_gloo.install()
        allstep_replace_gloo.install()  # a second call wraps nothing again
        with joined(backend) as (rank, _):
            groups = [
                dist.group.WORLD,
                dist.new_group([0, 1]),
                dist.new_group([0, 1], backend="gloo"),
            ]
            mesh = dist.init_device_mesh("cpu", (2,))
            outside = dist.new_group([1 - rank])
            assert outside is dist.GroupMember.NON_GROUP_MEMBER
            total = torch.tensor([rank + 1.0])
            for group in groups:
                dist.all_reduce(total, group=group)
            dist.monitored_barrier(groups[2])
            return [
                [type(group).__name__ for group in [*groups, mesh.get_group()]],
                [dist.get_backend(group) for group in groups],
                dist.get_backend_config(),
                total.item(),
            ]

    named = "undefined" if backend is None else backend
    config = {
        "gloo": "cpu:gloo,cuda:gloo",
        "undefined": "cpu:gloo",
        "allstep": "cpu:allstep,cuda:allstep",
    }
    expected = [["AllstepGroup"] * 4, [named, named, "gloo"], config.get(named, named), 12.0]
    assert ranks(2, work, backend, str(FOLDER)) == [expected] * 2


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that torch loads in a worker."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "allstep_replace_gloo", raising=False)
    return importlib.import_module("allstep_replace_gloo")


def made(hook: ModuleType, backend: str) -> str:
    """The backend that torch is asked for in the end.

    The group has other members, so that nothing is recorded.
    """
    helper = hook._replacing(lambda *arguments, **_: (arguments[3], None), distributed_c10d)
    backend_made, store = helper(2, 0, [], backend, None, "name", timeout=None)
    assert store is None
    return str(backend_made)


OTHERS = [
    "mpi",
    "ucc",
    "nccl",
    "cpu:mpi,cuda:nccl",
    "cuda:gloo",
    "cpu:gloo,xpu:xccl",
    "cpu:gloo,cuda:ucc",
]


@pytest.mark.parametrize("backend", OTHERS)
def test_other_backends_are_left_alone_with_one_line(
    hook: ModuleType, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    assert made(hook, backend) == backend
    assert made(hook, backend) == backend
    text = f"backend {backend!r} is not replaced: only gloo on the CPU is"
    assert capsys.readouterr().err == f"allstep: --replace-gloo: {text}\n"


def test_only_rank_0_reports(
    hook: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert made(hook, "ucc") == "ucc"
    assert made(hook, "fake") == "fake"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "backend", ["gloo", "GLOO", "undefined", "cpu:gloo", "cuda:nccl,cpu:gloo", "cpu:gloo,cuda:gloo"]
)
def test_what_is_replaced(
    hook: ModuleType, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    assert made(hook, backend) == "allstep"
    assert capsys.readouterr().err == ""


def test_a_torch_without_the_function_keeps_gloo_and_imports(
    hook: ModuleType, capsys, monkeypatch
) -> None:
    monkeypatch.delattr(distributed_c10d, "_new_process_group_helper")
    hook.install()
    assert "gloo is not replaced" in capsys.readouterr().err


@pytest.mark.usefixtures("processes")
def test_a_program_without_torch_is_as_before_and_the_users_sitecustomize_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = True")
    code = (
        "import sys; print(sys.customized, [name for name in sys.modules if"
        " name.startswith(('torch', 'allstep'))])"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = run("run", "-np", "1", "--replace-gloo", "python", "-c", code, env={"PYTHONPATH": path})
    assert (done.code, done.out) == (0, "[0] True []\n")
    assert done.err == f"allstep run: {LINE}\n"


def test_torch_must_load_its_plugins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns them off"):
        with_gloo_replaced({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert with_gloo_replaced({"PYTHONPATH": "mine"}) == {"PYTHONPATH": f"{FOLDER}{os.pathsep}mine"}
    assert with_gloo_replaced({}) == {"PYTHONPATH": str(FOLDER)}
