"""`make release` in a repository of its own, made from the tracked files as they are now."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import allstep

ROOT = Path(__file__).parent.parent
VERSION = "7.8.9"

pytestmark = pytest.mark.timeout(150)

# No settings of this machine, and an index that does not answer: a release fetches nothing.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PIP_"))},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/",
}


def run(repository: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=repository, env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )


def git(repository: Path, *arguments: str) -> str:
    result = run(repository, "git", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def release(repository: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Run `make release` with this environment's programs; `install` counts as done."""
    make = ["make", "-o", "install", "release", f"VENV={sys.prefix}", f"VERSION={version}"]
    return run(repository, *make)


def commit(repository: Path) -> None:
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "A change")


@pytest.fixture(scope="module")
def made(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tracked files, a fragment, and a released version 0.1.0."""
    if not (ROOT / ".git").exists():
        pytest.skip("the tests run outside of a git repository")
    folder = tmp_path_factory.mktemp("release")
    for name in git(ROOT, "ls-files", "-z").split("\0"):
        # The tests and documents take most of the time, and one test is enough to be left out.
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_none.py").write_text("")
    (folder / "changelog" / "planted.fixed.md").write_text("A planted\nfix.\n")
    changelog = folder / "CHANGELOG.md"
    changelog.write_text(
        changelog.read_text().replace("## 0.1.0 (unreleased)", "## 0.1.0 (2026-01-01)")
    )
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "config", "user.name", "A test")
    git(folder, "config", "user.email", "test@localhost")
    commit(folder)
    git(folder, "branch", "start")
    return folder


@pytest.fixture
def repository(made: Path) -> Path:
    """The same repository, as it was made."""
    git(made, "reset", "--quiet", "--hard", "start")
    git(made, "clean", "--quiet", "-d", "-x", "--force")
    if tags := git(made, "tag").split():
        git(made, "tag", "--delete", *tags)
    return made


def test_a_release(repository: Path) -> None:
    before = git(repository, "rev-parse", "HEAD").strip()
    result = release(repository, VERSION)
    assert result.returncode == 0, result.stdout + result.stderr

    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "rev-parse", "HEAD^", f"v{VERSION}^{{commit}}^").split() == [before] * 2
    assert git(repository, "cat-file", "-t", f"v{VERSION}") == "tag\n"
    assert git(repository, "log", "-1", "--format=%s") == f"Release {VERSION}\n"
    assert f'"{VERSION}"' in (repository / "src" / "allstep" / "_version.py").read_text()
    assert f'version: "{VERSION}"\n' in (repository / "CITATION.cff").read_text()

    text = (repository / "CHANGELOG.md").read_text()
    (section,) = re.findall(
        rf"^## {re.escape(VERSION)} \(\d{{4}}-\d\d-\d\d\)$.*?(?=^## )",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert "### Fixed\n\n" in section and "- A planted\n  fix.\n" in section
    assert [path.name for path in (repository / "changelog").iterdir()] == ["README.md"]

    files = {path.name: path for path in (repository / "dist").iterdir()}
    assert files.keys() == {f"allstep-{VERSION}.tar.gz", f"allstep-{VERSION}-py3-none-any.whl"}
    names = zipfile.ZipFile(files[f"allstep-{VERSION}-py3-none-any.whl"]).namelist()
    assert {name.partition("/")[0] for name in names} == {"allstep", f"allstep-{VERSION}.dist-info"}
    with tarfile.open(files[f"allstep-{VERSION}.tar.gz"]) as sdist:
        assert f"allstep-{VERSION}/tests/test_none.py" in sdist.getnames()

    assert f"  git push origin HEAD v{VERSION}\n  python -m twine upload dist/" in result.stdout

    again = release(repository, VERSION)
    assert f"version {VERSION} is not newer than {VERSION}, which is released" in again.stderr
    git(repository, "tag", "--delete", f"v{VERSION}")  # as in a shallow clone
    assert again.stderr == release(repository, VERSION).stderr


def test_the_first_release_has_the_version_that_is_written(repository: Path) -> None:
    """Version 0.1.0 was in `_version.py` before it was released: that is no reason to refuse it."""
    changelog = repository / "CHANGELOG.md"
    changelog.write_text(
        changelog.read_text().replace(f"## {allstep.__version__} (2", "## 0.0.1 (2")
    )
    remove_fragments(repository)
    commit(repository)
    refused(repository, allstep.__version__, "changelog/ has no fragments")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("7.8", "version '7.8' is not of the form x.y.z"),
        ("v7.8.9", "version 'v7.8.9' is not of the form x.y.z"),
        ("7.8.09", "version '7.8.09' is not of the form x.y.z"),
        ("7.8.9rc1", "version '7.8.9rc1' is not of the form x.y.z"),
        ("0.0.9", "version 0.0.9 is older than"),
        ("", "usage: make release VERSION=x.y.z"),
    ],
)
def test_a_wrong_version_is_refused(repository: Path, version: str, reason: str) -> None:
    refused(repository, version, reason)


def test_a_tag_that_is_newer_is_refused(repository: Path) -> None:
    git(repository, "tag", "v10.0.0")
    refused(repository, VERSION, "version 7.8.9 is not newer than 10.0.0")


@pytest.mark.parametrize("name", ["README.md", "new.txt"])
def test_a_dirty_tree_is_refused(repository: Path, name: str) -> None:
    (repository / name).write_text("changed")
    refused(repository, VERSION, f"the tree is not clean; commit or remove first: .* {name}")


def test_no_fragments_are_refused(repository: Path) -> None:
    remove_fragments(repository)
    commit(repository)
    refused(repository, VERSION, "changelog/ has no fragments")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('= ["src/allstep"]', '= ["src/allstep", "tests"]', "has files of .*: tests/test_none.py"),
        ('path = "src/allstep/_version.py"', 'path = "none.py"', "-m build .* exited with 1"),
    ],
    ids=["packages", "version"],
)
def test_a_wrong_build_leaves_no_trace(repository: Path, old: str, new: str, reason: str) -> None:
    settings = repository / "pyproject.toml"
    text = settings.read_text()
    assert old in text
    settings.write_text(text.replace(old, new))
    commit(repository)
    refused(repository, VERSION, reason)


def remove_fragments(repository: Path) -> None:
    for path in (repository / "changelog").glob("*.*.md"):
        path.unlink()


def refused(repository: Path, version: str, reason: str) -> None:
    """No release for this reason, and nothing in the repository has changed."""
    before = [git(repository, *command) for command in (("status", "-s"), ("log",), ("tag",))]
    result = release(repository, version)
    assert result.returncode == 2  # make's own
    assert re.search(rf"^(no release: .*)?{reason}", result.stderr, re.MULTILINE), result.stderr
    after = [git(repository, *command) for command in (("status", "-s"), ("log",), ("tag",))]
    assert after == before
