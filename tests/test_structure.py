"""Limits on the shape of source and tests, each with a planted violation that it must find."""

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "allstep"
HOROVODS_NAMES = "horovod_path"
"""What `import horovod` finds: its modules have Horovod's names."""

MOST_MODULES = 20
MOST_LINES = 400
MEDIAN_FUNCTION = 6
NINE_OF_TEN_FUNCTIONS = 15
LONGEST_FUNCTION = 60

NOT_IN_THE_SOURCE = ("support", "environments", "gloo_scripts", "hvd_scripts", "train/old_run")
"""Folders of tests/ without a package of the same name: shared modules, data, scripts to run."""


def modules(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*.py")) if HOROVODS_NAMES not in path.parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def crowded_folders(root: Path) -> list[str]:
    count: dict[Path, int] = defaultdict(int)
    for path in modules(root):
        count[path.parent] += path.name != "__init__.py"
    return [
        f"{folder.name}: {number} modules"
        for folder, number in count.items()
        if number > MOST_MODULES
    ]


def long_modules(root: Path) -> list[str]:
    sizes = {path: len(path.read_text().splitlines()) for path in modules(root)}
    return [f"{path.name}: {lines} lines" for path, lines in sizes.items() if lines > MOST_LINES]


def functions(root: Path) -> Iterator[tuple[str, str, int]]:
    """Yield path, name and lines of each function; its docstring is not counted."""
    for path in modules(root):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path.relative_to(root).as_posix(), node.name, lines_of(node)


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring, which may be as long as it needs."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if len(function.body) > 1 and ast.get_docstring(function) is not None:
        text = function.body[0]
        assert text.end_lineno is not None
        lines -= text.end_lineno - text.lineno + 1
    return lines


def long_functions(root: Path) -> list[str]:
    found = [each for each in functions(root) if each[2] > LONGEST_FUNCTION]
    return [f"{path}: {name}, {lines} lines" for path, name, lines in found]


def repeated_classes(root: Path) -> list[str]:
    """Class names that occur in two subpackages of one package."""
    places: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in modules(root):
        package, *inner = path.relative_to(root).parts
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                places[package, node.name].add(inner[0] if len(inner) > 1 else "")
    return [f"{package}: {name}" for (package, name), found in places.items() if len(found) > 1]


SAME_IDEA = {
    "callbacks": "a front-end's callbacks, Horovod's name",
    "compression": "a front-end's compressors, Horovod's name",
    "dialect": "what the two Kerases write differently",
    "elastic": "a front-end's elastic states, Horovod's name",
    "evaluate": "a split with a model: of the run, of a saved run",
    "fit": "two variables of runs: in a study, in a report",
    "functions": "a front-end's broadcasts, Horovod's name",
    "labels": "the label of a sample, by format",
    "measure": "a benchmark",
    "messages": "typed messages between processes",
    "mistakes": "wrongly classified images: found by train, drawn by report",
    "mpi_ops": "a front-end's operations, Horovod's name",
    "optimizer": "a front-end's DistributedOptimizer, Horovod's name",
    "options": "options of commands, or of models in a config",
    "predict": "the verb and what it does",
    "rank": "the program of one rank of a benchmark",
    "replay": "the verb and what it does, for pushes and for a run",
    "report": "a page about a run, a machine",
    "result": "the figures of a benchmark",
    "run": "the verb; a run that is reported",
    "scan": "the walk through a damaged file, by format",
    "source": "samples by number, by format",
    "study": "the verb, and each kind of study",
    "sync_batch_norm": "a front-end's batch normalization, Horovod's name",
    "table": "the result of a study or command as a table",
    "timeline": "the trace of collectives, and Horovod's",
    "verify": "the verb and what it does",
}
"""Module names that several folders may use, for the same idea."""


def repeated_modules(root: Path) -> list[str]:
    """Return module names in several folders that are not one idea."""
    count = Counter(path.stem for path in modules(root) if path.name != "__init__.py")
    return [name for name, number in count.items() if number > 1 and name not in SAME_IDEA]


CHECKS = [crowded_folders, long_modules, long_functions, repeated_classes, repeated_modules]


@pytest.mark.parametrize("check", CHECKS)
def test_the_source_keeps_to_the_limits(check: object) -> None:
    assert check(SOURCE) == []  # type: ignore[operator]


def test_functions_are_short() -> None:
    lengths = sorted(lines for _, _, lines in functions(SOURCE))
    assert len(lengths) > 4000
    assert statistics.median(lengths) <= MEDIAN_FUNCTION
    assert lengths[int(0.9 * len(lengths))] <= NINE_OF_TEN_FUNCTIONS


def test_a_planted_violation_is_found(tmp_path: Path) -> None:
    for part in ("a", "b"):
        folder = tmp_path / "package" / part
        folder.mkdir(parents=True)
        (folder / "module.py").write_text("class Same:\n    pass\n")
    for number in range(MOST_MODULES):
        (tmp_path / "package" / "a" / f"m{number}.py").touch()
    body = "\n".join(f"    x = {number}" for number in range(MOST_LINES))
    (tmp_path / "package" / "long.py").write_text(f"def f():\n{body}\n")
    assert [len(check(tmp_path)) for check in CHECKS] == [1, 1, 1, 1, 1]


# The tests


def _is_listed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in NOT_IN_THE_SOURCE)


def support_elsewhere(tests: Path) -> list[str]:
    """Modules outside `support` that are no tests."""
    paths = [path.relative_to(tests) for path in sorted(tests.rglob("*.py"))]
    return [
        path.as_posix()
        for path in paths
        if not (_is_listed(path) or path.name.startswith("test_") or path.name == "conftest.py")
    ]


def folders_without_a_package(tests: Path) -> list[str]:
    folders = [path.relative_to(tests) for path in sorted(tests.rglob("*")) if path.is_dir()]
    return [
        folder.as_posix()
        for folder in folders
        if not (_is_listed(folder) or folder.name == "__pycache__" or (SOURCE / folder).is_dir())
    ]


TREE_CHECKS = [support_elsewhere, folders_without_a_package]


@pytest.mark.parametrize("check", TREE_CHECKS)
def test_the_tests_follow_the_source(check: object) -> None:
    assert check(TESTS) == []  # type: ignore[operator]


def test_every_listed_folder_exists() -> None:
    assert [name for name in NOT_IN_THE_SOURCE if not (TESTS / name).is_dir()] == []


def test_a_planted_folder_or_module_is_found(tmp_path: Path) -> None:
    for name in ("support/ranks.py", "comm/test_a.py", "comm/helper.py", "nothing/test_b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [check(tmp_path) for check in TREE_CHECKS] == [["comm/helper.py"], ["nothing"]]
