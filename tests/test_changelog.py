"""Changelog fragments: the check finds each planted mistake, and a build moves them into their
version's section."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def changelog(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "changelog"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def project(processes: None, tmp_path: Path) -> Path:
    """A folder with the tool, its settings, a changelog and no fragments."""
    for name in ("tools/changelog", "pyproject.toml", "changelog/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    head, marker, _ = (ROOT / "CHANGELOG.md").read_text().partition("notes start -->\n")
    (tmp_path / "CHANGELOG.md").write_text(head + marker)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


def section(project: Path) -> str:
    return (project / "CHANGELOG.md").read_text().partition("notes start -->\n")[2]


@pytest.mark.usefixtures("processes")
def test_the_fragments_here_are_right() -> None:
    result = changelog(ROOT, "check")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("good.bug.md", "Text.\n", "name is not <slug>.<kind>.md with a kind of added, changed"),
        ("good.fixed.txt", "Text.\n", "name is not"),
        ("good.fixed", "Text.\n", "name is not"),
        ("Not_a_slug.fixed.md", "Text.\n", "name is not"),
        ("fixed.md", "Text.\n", "name is not"),
        ("empty.added.md", " \n", "is empty"),
        ("open.added.md", "Text.", "does not end with a newline"),
        ("long.added.md", f"Text.\n{'x' * 99}\n", "line 2 has 99 columns, at most 98 fit"),
        ("two.added.md", "One.\n\nTwo.\n", "has an empty line"),
        ("bullet.added.md", "- Text.\n", "starts with '-'"),
        ("heading.added.md", "# Text.\n", "starts with '#'"),
    ],
)
def test_a_wrong_fragment_is_found(project: Path, name: str, text: str, problem: str) -> None:
    (project / "changelog" / "right.added.md").write_text(f"{'x' * 98}\n")
    assert changelog(project, "check").returncode == 0
    (project / "changelog" / name).write_text(text)
    result = changelog(project, "check")
    assert result.returncode == 1
    assert result.stderr.startswith(f"changelog/{name}: {problem}")
    assert result.stderr.count("\n") == 1
    assert changelog(project, "build", "0.2.0", "2026-01-02").returncode == 1
    assert section(project) == ""


def test_fragments_are_sorted_by_kind_and_slug(project: Path) -> None:
    for name in ("late.fixed", "b.added", "a.added"):
        (project / "changelog" / f"{name}.md").write_text(f"Text of\n{name}.\n")
    assert changelog(project, "build", "0.2.0", "2026-01-02").returncode == 0
    text = "## 0.2.0 (2026-01-02)\n\n### Added\n\n- Text of\n  a.added.\n- Text of\n  b.added.\n"
    assert section(project).strip() == f"{text}\n### Fixed\n\n- Text of\n  late.fixed."
    assert [path.name for path in (project / "changelog").iterdir()] == ["README.md"]


def test_the_unreleased_text_stays_in_its_version(project: Path) -> None:
    (project / "changelog" / "new.changed.md").write_text("New.\n")
    with (project / "CHANGELOG.md").open("a") as file:
        file.write("\n## 0.2.0 (unreleased)\n\nOld text.\n\n## 0.1.0 (2026-01-01)\n\nFirst.\n")
    before = section(project)

    result = changelog(project, "build", "0.3.0", "2026-01-02")
    assert result.returncode == 1
    assert result.stderr == "CHANGELOG.md has unreleased ['0.2.0'], not 0.3.0\n"
    assert section(project) == before

    assert changelog(project, "build", "0.2.0", "2026-01-02").returncode == 0
    lines = [line for line in section(project).splitlines() if line]
    assert lines == [
        "## 0.2.0 (2026-01-02)",
        "### Changed",
        "- New.",
        "### Earlier changes",
        "Old text.",
        "## 0.1.0 (2026-01-01)",
        "First.",
    ]
