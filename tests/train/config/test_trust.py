"""Code that a run folder may execute: none, unless this user wrote the folder or gives --trust."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from allstep.errors import ConfigError
from allstep.models.by_name import check_name
from allstep.train import read_config
from allstep.train.config import trust
from allstep.train.config.run_config import ModelConfig
from allstep.train.folder.claim import claim_folder
from allstep.train.folder.read import run_config
from support.ranks import clean_environment

MODELS = """
import sys
from pathlib import Path
from subprocess import run
from torch import nn
Path({mark!r}).touch()
class Net(nn.Module):
    def __init__(self, num_classes, shape, hidden=4):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], num_classes))
    def forward(self, x):
        return self.net(x)
    @classmethod
    def small(cls, num_classes, shape):
        return cls(num_classes, shape)
class Other:
    def __init__(self, num_classes):
        Path({mark!r}).write_text("called")
"""
OVERRIDES = ["model=my_nets:Net", "epochs=1", "batch=64", "data.validation=100"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's config folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def project(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's project, the current folder; importing its module creates `executed`."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_nets.py").write_text(MODELS.format(mark=str(folder / "executed")))
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    return folder


def allstep(*arguments: str | Path, home: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**clean_environment(), "XDG_CONFIG_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "allstep", *map(str, arguments)]
    return subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=150
    )


def claimed(out: Path, overrides: Sequence[str] = OVERRIDES) -> Path:
    """Return a run folder that this user started."""
    claim_folder(read_config("digits", overrides), out)
    (out / "run.jsonl").write_text('{"kind": "start", "time": 1}\n')
    return out


def refused(folder: Path, **options: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        run_config(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_of_this_user_needs_no_flag(project: Path) -> None:
    out = claimed(project / "run")
    assert run_config(out).model.name == "my_nets:Net"
    assert read_config(str(out / "config.yaml")).model.name == "my_nets:Net"
    # A copy is as good: what the seal covers is the same.
    shutil.copytree(out, project / "copy")
    assert run_config(project / "copy").model.name == "my_nets:Net"
    # Keys that execute nothing may be edited.
    config = out / "config.yaml"
    config.write_text(config.read_text().replace("epochs: 1\n", "epochs: 2\n"))
    assert run_config(out).epochs == 2
    assert not (project / "executed").exists()


def test_a_folder_without_the_users_seal_needs_the_flag(project: Path, home: Path) -> None:
    out = claimed(project / "run")
    key = trust.key_file()
    assert key.is_relative_to(home) and key.stat().st_mode & 0o777 == 0o600
    key.unlink()
    message = refused(out)
    assert f"its model my_nets:Net would execute code of {project / 'my_nets.py'}" in message
    assert message.endswith("add --trust")
    assert run_config(out, trust=True).model.name == "my_nets:Net"
    with pytest.raises(ConfigError, match="add --trust"):
        read_config(str(out / "config.yaml"), ["epochs=3"])
    assert read_config(str(out / "config.yaml"), ["trust=true"]).model.name == "my_nets:Net"
    # A seal of another user: another key.
    claimed(project / "other")
    assert run_config(project / "other").model.name == "my_nets:Net"
    refused(out)
    # Continuing the training, by a command that names the model, seals the folder again.
    claim_folder(read_config("digits", OVERRIDES), out, resume=True)
    assert run_config(out).model.name == "my_nets:Net"


@pytest.mark.parametrize(
    "change", ["model", "options", "place", "no seal", "seal", "trust in the config", "key mode"]
)
def test_what_a_seal_does_not_cover(
    project: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = claimed(project / "run")
    config = out / "config.yaml"
    if change == "model":
        config.write_text(config.read_text().replace("my_nets:Net", "my_nets:Net.small"))
    elif change == "options":
        config.write_text(config.read_text().replace("options: {}", "options: {hidden: 5}"))
    elif change == "place":
        # The seal was copied into another person's archive, next to a module of the same name.
        theirs = project.parent / "theirs"
        theirs.mkdir()
        shutil.copytree(out, theirs / "run")
        shutil.copy(project / "my_nets.py", theirs)
        monkeypatch.chdir(theirs)
        out = theirs / "run"
    elif change == "no seal":
        (out / "run.seal").unlink()
    elif change == "seal":
        (out / "run.seal").write_text("0" * 64)
    elif change == "trust in the config":
        (out / "run.seal").unlink()
        config.write_text(config.read_text() + "trust: true\n")
    else:
        # Other users could have read it.
        trust.key_file().chmod(0o644)
    assert "add --trust" in refused(out)
    assert not (project / "executed").exists()


@pytest.mark.parametrize("options", ["{}", "{width: 3}"])
@pytest.mark.parametrize("name", ["my_nets:Net", "other_nets:Net"])
def test_workers_execute_what_the_launcher_has_checked(
    project: Path, home: Path, name: str, options: str
) -> None:
    """config.yaml may be replaced between the two; workers do not check its seal again."""
    out = claimed(project / "run")
    config = out / "config.yaml"
    override = trust.trust_override(run_config(out).model)
    # A worker on another host has no key.
    trust.key_file().unlink()
    config.write_text(
        config.read_text()
        .replace("my_nets:Net", name)
        .replace("options: {}", f"options: {options}")
    )
    if (name, options) == ("my_nets:Net", "{}"):
        assert read_config(str(config), [override]).model.name == name
        return
    with pytest.raises(
        ConfigError, match=f"its model {name} is not the one that was checked"
    ) as caught:
        read_config(str(config), [override])
    assert "\n" not in str(caught.value)
    # In the file itself the override does not count.
    config.write_text(
        config.read_text()
        + f"trust: {trust.trust_override(ModelConfig(name=name)).partition('=')[2]}\n"
    )
    refused(out)


def test_workers_may_not_be_given_another_model_in_place_of_ours(project: Path) -> None:
    out = claimed(project / "run", ["epochs=1"])
    config = out / "config.yaml"
    override = trust.trust_override(run_config(out).model)
    assert read_config(str(config), [override])
    text = config.read_text()
    config.write_text(text.replace(f"name: {run_config(out).model.name}", "name: my_nets:Net"))
    assert config.read_text() != text
    with pytest.raises(ConfigError, match="is not the one that was checked"):
        read_config(str(config), [override])


def test_a_users_own_file_and_overrides_need_no_flag(project: Path) -> None:
    (project / "mine.yaml").write_text("recipe: digits\nmodel: my_nets:Net\ntrust: true\n")
    assert read_config("mine.yaml").model.name == "my_nets:Net"
    out = claimed(project / "run", ["epochs=1"])
    assert not (out / "run.seal").exists()
    assert read_config(str(out / "config.yaml"), ["model=my_nets:Net"]).model.name == "my_nets:Net"
    with pytest.raises(ConfigError, match="trust: expected true or false, found 'yes please'"):
        read_config("digits", ["trust=yes please"])


def test_an_unreadable_home_costs_the_seal_only(project: Path, home: Path) -> None:
    home.write_text("a file where a folder should be")
    out = claimed(project / "run")
    assert not (out / "run.seal").exists()
    assert "add --trust" in refused(out)


def test_a_seal_is_not_written_through_a_link(project: Path) -> None:
    precious = project / "precious"
    precious.write_text("mine")
    (project / "run").mkdir()
    (project / "run" / "run.seal").symlink_to(precious)
    claimed(project / "run")
    assert precious.read_text() == "mine"
    assert run_config(project / "run").model.name == "my_nets:Net"


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:run", "builtins:exec", "test.support:run_in_subinterp"]
)
def test_the_standard_library_has_no_models(name: str) -> None:
    with pytest.raises(ConfigError, match="of Python's standard library; expected one of your own"):
        check_name(name)


@pytest.mark.usefixtures("processes")
def test_a_config_of_another_person_executes_nothing(
    project: Path, home: Path, tmp_path: Path
) -> None:
    """A folder that names os:system, and one that names code of the current folder, with each
    command."""
    theirs = tmp_path / "theirs"
    shutil.copytree(claimed(project / "run"), theirs / "own-code")
    shutil.copytree(theirs / "own-code", theirs / "system")
    config = theirs / "system" / "config.yaml"
    touch = tmp_path / "called"
    text = (
        config.read_text()
        .replace("my_nets:Net", "os:system")
        .replace("options: {}", f"options: {{command: touch {touch}}}")
    )
    config.write_text(text + "trust: true\n")
    assert "os:system" in text and "touch" in text
    other = tmp_path / "other-home"
    for folder in ("own-code", "system"):
        run = theirs / folder
        commands: list[list[str | Path]] = [
            ["predict", run, "a.png"],
            ["eval", run],
            ["verify", run / "config.yaml"],
            ["train", run / "config.yaml", "--out", tmp_path / "new"],
            ["train", "--resume", run],
            ["study", "batch", run / "config.yaml", "--out", tmp_path / "study"],
        ]
        for command in commands:
            done = allstep(*command, home=other, cwd=project)
            assert done.returncode == 2, (command, done.stderr)
            assert "Traceback" not in done.stderr, done.stderr
            assert len(done.stderr.strip().splitlines()) == 1, done.stderr
            assert "--trust" in done.stderr or "standard library" in done.stderr, done.stderr
            # The standard library is refused with the flag, too.
            if folder == "system":
                done = allstep(*command, "--trust", home=other, cwd=project)
                assert done.returncode == 2 and "Traceback" not in done.stderr, (
                    command,
                    done.stderr,
                )
        assert (
            allstep("report", run, "-o", tmp_path / "r.html", home=other, cwd=project).returncode
            == 0
        )
    assert not (project / "executed").exists() and not touch.exists()
    assert not (tmp_path / "new").exists() and not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my_nets:run", "it belongs to 'subprocess' of Python's standard library"),
        ("my_nets:sys.exit", "'sys' is a module that my_nets has imported"),
        (
            "my_nets:Path",
            "it is the class Path, expected a subclass of torch.nn.Module or a Python function",
        ),
        (
            "my_nets:Other",
            "it is the class Other, expected a subclass of torch.nn.Module or a Python function",
        ),
        ("yaml:nodes", "'nodes' is a module that yaml has imported"),
        ("math:sqrt", "standard library"),
    ],
)
def test_only_classes_of_models_and_python_functions(
    project: Path, name: str, expected: str
) -> None:
    from allstep.models import make_model, make_norm

    with pytest.raises(ConfigError, match=expected):
        make_model(name, num_classes=3, shape=(1, 4, 4), norm=make_norm("none"))
    mark = project / "executed"
    assert mark.exists() == name.startswith("my_nets") and (
        not mark.exists() or mark.read_text() != "called"
    )


def test_a_factory_may_be_a_method(project: Path) -> None:
    from allstep.models import make_model, make_norm

    make_model("my_nets:Net.small", num_classes=3, shape=(1, 4, 4), norm=make_norm("none"))


def test_seals_differ_by_what_they_cover(project: Path) -> None:
    models = [
        ModelConfig(name="my_nets:Net", options=options)
        for options in ({}, {"hidden": 3}, {"hidden": 4})
    ]
    seals = {trust._seal(bytes(32), model) for model in models} | {
        trust._seal(bytes([1] * 32), models[0])
    }
    assert len(seals) == 4


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(300)
def test_train_then_predict_and_evaluate_without_a_flag(project: Path, home: Path) -> None:
    """The ordinary case, the user's own model with two workers; then the folder as another user."""
    (project / "mine.yaml").write_text("recipe: digits\nmodel: my_nets:Net\nepochs: 1\n")
    done = allstep("train", "mine.yaml", "--workers", "2", "--out", "run", home=home, cwd=project)
    assert done.returncode == 0, done.stderr
    done = allstep("eval", "run", home=home, cwd=project)
    assert done.returncode == 0, done.stderr
    done = allstep("train", "--resume", "run", home=home, cwd=project)
    assert done.returncode == 0 and "this run has ended" in done.stdout, done.stderr
    # As after a kill: rank 0 reads the folder's config, with the flag of the launching process.
    log = project / "run" / "run.jsonl"
    log.write_text(
        "".join(line for line in log.read_text().splitlines(keepends=True) if '"end"' not in line)
    )
    done = allstep("train", "--resume", "run", "--workers", "1", home=home, cwd=project)
    assert done.returncode == 0, done.stderr
    other = project.parent / "other-home"
    done = allstep("eval", "run", home=other, cwd=project)
    assert done.returncode == 2 and "add --trust" in done.stderr
    done = allstep("eval", "run", "--trust", home=other, cwd=project)
    assert done.returncode == 0, done.stderr
    assert not other.exists()
