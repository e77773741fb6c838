"""The workflows call targets of the Makefile alone, and run what pyproject.toml claims.

Each check is a function that returns what is wrong, so that a planted mistake shows that it can
fail.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").iterdir())}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = {
    *re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE),
}


def read(name: str) -> dict[str, Any]:
    workflow = yaml.safe_load(WORKFLOWS[name].read_text())
    assert isinstance(workflow, dict)
    return workflow


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def claimed_pythons() -> list[str]:
    classifiers = "\n".join(PROJECT["classifiers"])
    return re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE)


def lowest_torch() -> str:
    (found,) = [each for each in PROJECT["dependencies"] if re.match(r"torch\b", each)]
    match = re.fullmatch(r"torch>=([\d.]+)(,.*)?", found)
    assert match is not None
    return match[1]


def foreign_commands(workflow: dict[str, Any]) -> list[str]:
    """Return the commands that are not `make` with a target that exists."""
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    matches = [
        re.fullmatch(r"make ([a-z]+)( [A-Z]+=\S*| [A-Z]+=\$\{\{ [\w.]+ \}\})*", each)
        for each in commands
    ]
    return [
        command
        for command, match in zip(commands, matches, strict=True)
        if match is None or match[1] not in TARGETS
    ]


def loose_actions(workflow: dict[str, Any]) -> list[str]:
    """Return the actions that are pinned neither to a version nor to a commit."""
    actions = [step["uses"] for step in steps(workflow) if "uses" in step]
    return [each for each in actions if not re.search(r"@(v\d+(\.\d+)*|[0-9a-f]{40})$", each)]


def excess(workflow: dict[str, Any]) -> list[str]:
    """Return what a workflow may do beyond reading the repository for a limited time."""
    found = []
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("permissions")
    # YAML 1.1 reads the key `on` as true.
    if "pull_request_target" in workflow[True]:
        found.append("pull_request_target")
    for job in workflow["jobs"].values():
        found += ["permissions of a job"] if "permissions" in job else []
        found += [] if "timeout-minutes" in job else ["no time limit"]
    return found


def matrix(workflow: dict[str, Any]) -> list[dict[str, str]]:
    (job,) = workflow["jobs"].values()
    rows: list[dict[str, str]] = job["strategy"]["matrix"]["include"]
    return rows


def test_each_target_has_a_workflow() -> None:
    assert {
        name: [step["run"] for step in steps(read(name)) if "run" in step] for name in WORKFLOWS
    } == {
        "check": ["make check"],
        "full": ["make test"],
        "quick": ["make quick TORCH=${{ matrix.torch }}"],
    }


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_calls_targets_and_may_do_little(name: str) -> None:
    workflow = read(name)
    assert foreign_commands(workflow) == []
    assert loose_actions(workflow) == []
    assert excess(workflow) == []


def test_planted_mistakes_are_found() -> None:
    workflow = read("check")
    (job,) = workflow["jobs"].values()
    job["steps"] += [{"run": "pip install allstep"}, {"run": "make none"}, {"uses": "a/b@main"}]
    job["permissions"] = {"contents": "write"}
    del workflow["permissions"], job["timeout-minutes"]
    workflow[True]["pull_request_target"] = None
    assert foreign_commands(workflow) == ["pip install allstep", "make none"]
    assert loose_actions(workflow) == ["a/b@main"]
    assert excess(workflow) == [
        "permissions",
        "pull_request_target",
        "permissions of a job",
        "no time limit",
    ]


def test_the_tested_pythons_are_the_claimed_ones() -> None:
    rows = matrix(read("quick"))
    assert [row["python"] for row in rows] == claimed_pythons()
    assert PROJECT["requires-python"].startswith(f">={claimed_pythons()[0]}")


def test_the_lowest_torch_is_tested() -> None:
    assert [row["torch"] for row in matrix(read("quick")) if "torch" in row] == [lowest_torch()]


def test_the_other_workflows_run_a_claimed_python() -> None:
    (setup,) = [
        step["with"] for step in steps(read("check")) if "python-version" in step.get("with", {})
    ]
    assert setup["python-version"] in claimed_pythons()
    image = read("full")["jobs"]["full"]["container"]["image"]
    assert image.removeprefix("python:").partition("-")[0] in claimed_pythons()
