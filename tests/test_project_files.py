"""Files for contributors, read by other programs: pre-commit, GitHub, readers of citations."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import allstep

ROOT = Path(__file__).parent.parent
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def commands_of_check() -> list[str]:
    """Return the commands of `make check`."""
    match = re.search(r"^check:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in match[1].splitlines()]


def test_the_hooks_are_the_commands_of_make_check() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    hooks = repository["hooks"]
    assert [hook["entry"] for hook in hooks] == commands_of_check()
    assert {(hook["language"], hook["pass_filenames"]) for hook in hooks} == {("system", False)}


def test_the_citation_is_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == allstep.__version__
    assert citation["title"] == PROJECT["name"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert citation["authors"] == [{"name": "The allstep authors"}]
    assert citation.keys() >= {"cff-version", "message", "type"}


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_an_issue_form_is_one(name: str) -> None:
    """GitHub drops a form with a mistake and shows no error."""
    form = read(FORMS / name)
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown"}
    for field in fields:
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        assert field["attributes"]["label"]
        assert len(field["attributes"].get("options", ["one"])) == len(
            set(field["attributes"].get("options", ["one"]))
        )
    for values in ([field["id"] for field in fields], [f["attributes"]["label"] for f in fields]):
        assert len(set(values)) == len(values)


def test_a_bug_report_has_what_is_needed() -> None:
    required = {
        field["id"]
        for field in read(FORMS / "bug.yml")["body"]
        if field.get("validations", {}).get("required")
    }
    assert required == {"what", "reproduce", "output", "launcher", "doctor", "versions"}
    assert "SECURITY.md" in (FORMS / "bug.yml").read_text()
    assert read(FORMS / "config.yml") == {"blank_issues_enabled": False}
