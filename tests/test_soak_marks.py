"""A test that does more in `make soak` must be selected by it: its mark is `soak`, or it is random.

`make soak` runs `pytest -m soak`. Without the mark, the branch of a test for ALLSTEP_SOAK never
runs. Names of a module that depend on the variable are followed, for example a number of rounds, or
a function that returns parameters.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
VARIABLE = "ALLSTEP_SOAK"
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign


def definitions(module: ast.Module) -> dict[str, Definition]:
    """Return functions, classes and constants of a module by name; methods of classes as well."""
    found: dict[str, Definition] = {}
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    for node in [*module.body, *(each for holder in classes for each in holder.body)]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            targets = [name for target in node.targets for name in ast.walk(target)]
            found |= {each.id: node for each in targets if isinstance(each, ast.Name)}
    return found


def words(node: ast.AST) -> set[str]:
    """Return names, attributes and texts in a piece of code."""
    return {
        str(word)
        for each in ast.walk(node)
        for word in (getattr(each, name, None) for name in ("id", "attr", "value"))
        if isinstance(word, str)
    }


def all_words(node: ast.AST, known: dict[str, Definition]) -> set[str]:
    """Return the words of a definition and of the definitions that it uses by name."""
    found, seen, waiting = set(), set(), [node]
    while waiting:
        here = waiting.pop()
        found |= words(here)
        names = {each.id for each in ast.walk(here) if isinstance(each, ast.Name)} - seen
        seen |= names
        waiting += [known[name] for name in names if name in known]
    return found


def unmarked(source: str) -> list[str]:
    """Return the tests of a module that depend on the variable but are not in the soak."""
    module = ast.parse(source)
    known = definitions(module)
    marks = words(known["pytestmark"]) if "pytestmark" in known else set()
    return [
        name
        for name, node in known.items()
        if name.startswith("test_") and isinstance(node, ast.FunctionDef)
        if (uses := all_words(node, known)) & {"SOAK", VARIABLE}
        if not (uses | marks) & {"soak", "given"}
    ]


def test_planted_tests_without_the_mark_are_found() -> None:
    source = """
COUNT = 200 if SOAK else 20
def rounds(): return [0, 1] if os.environ.get("ALLSTEP_SOAK") else [0]
def test_one(): run(COUNT)
def test_two(run=rounds()): run()
@pytest.mark.soak(1)
def test_three(): run(COUNT)
@given(number)
def test_four(): run(COUNT)
def test_five(): run(20)
class TestSix:
    def test_six(self): run(SOAK)
"""
    assert unmarked(source) == ["test_one", "test_two", "test_six"]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.relative_to(TESTS).as_posix())
        for path in sorted(TESTS.rglob("test_*.py"))
        if "SOAK" in path.read_text() and path != Path(__file__)
    ],
)
def test_tests_of_the_soak_have_its_mark(path: Path) -> None:
    assert unmarked(path.read_text()) == []
