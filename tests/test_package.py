"""The surface of the package: what it shows is what it lists, and asking it for help costs next to
nothing."""

import ast
import importlib
import pkgutil
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import allstep
from allstep.cli.app import app

BIN = Path(sys.executable).parent
ALLSTEP = str(BIN / "allstep")
VERBS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
PRIVATE = {"allstep.cli"}  # a command line is not imported
FRONT_ENDS = {"allstep.keras", "allstep.keras2", "allstep.tensorflow", "allstep.mxnet"}
"""They import their frameworks, which takes seconds: only their text is read here."""
PACKAGES = [
    "allstep",
    *(
        package.name
        for package in pkgutil.iter_modules(allstep.__path__, "allstep.")
        if package.ispkg and package.name not in PRIVATE | FRONT_ENDS
    ),
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def visible(source: str) -> set[str]:
    """Names that a package shows: those it defines or takes from allstep, without an underscore in
    front; modules are no names."""
    names: set[str] = set()
    for node in _top_level(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("allstep."):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_") or name == "__version__"}


def _top_level(module: ast.Module) -> list[ast.stmt]:
    """Statements of a module, those under `if TYPE_CHECKING:` (names that are fetched when first
    used) among them."""
    return [
        inner
        for node in module.body
        for inner in (node.body if isinstance(node, ast.If) else [node])
    ]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_what_is_visible(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__file__ is not None
    shown = getattr(
        package, "__all__", []
    )  # some are for the other packages alone, which import their modules
    assert sorted(shown) == sorted(visible(Path(package.__file__).read_text()))
    for each in shown:
        assert hasattr(package, each), each


@pytest.mark.parametrize("name", sorted(FRONT_ENDS))
def test_all_of_a_front_end_is_what_is_visible(name: str) -> None:
    source = (Path(allstep.__path__[0]) / name.removeprefix("allstep.") / "__init__.py").read_text()
    module = ast.parse(source)
    (shown,) = (
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    )
    made_late = {"SyncBatchNormalization"} if name == "allstep.tensorflow" else set()
    assert len(shown) == len(set(shown)) and set(shown) - made_late == visible(source)
    assert ast.get_docstring(module)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_describes_itself(name: str) -> None:
    assert importlib.import_module(name).__doc__


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'initt'; it has .*init"):
        _ = allstep.initt


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_loads_neither_torch_nor_numpy(verb: str | None) -> None:
    command = [verb, "--help"] if verb else ["--help"]
    result = run(sys.executable, "-X", "importtime", "-m", "allstep", *command)
    assert result.returncode == 0, result.stderr
    assert "Usage:" in result.stdout
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "allstep.cli" in loaded
    assert not {"torch", "numpy"} & loaded


@pytest.mark.usefixtures("processes")
def test_import_loads_neither_torch_nor_numpy() -> None:
    result = run(
        sys.executable, "-c", "import allstep, sys; print({'torch', 'numpy'} & set(sys.modules))"
    )
    assert result.stdout == "set()\n", result.stderr


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "command",
    [(sys.executable, "-c", "import allstep"), (ALLSTEP, "--help")],
    ids=["import", "help"],
)
def test_it_answers_at_once(command: tuple[str, ...]) -> None:
    """0.3 s is the promise.

    What a busy machine does in between is not ours: the time on a core counts.
    """
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(*command).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1.5, seconds


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "command", [(ALLSTEP,), (sys.executable, "-m", "allstep")], ids=["script", "module"]
)
def test_version(command: tuple[str, ...]) -> None:
    assert run(*command, "--version").stdout == f"allstep {allstep.__version__}\n"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["rum", "-np", "2", "true"], "Did you mean 'run'?"),
        (["bench", "lunch"], "Did you mean 'launch'?"),
        (["run", "--lot-dir", "logs", "true"], "options: --log-dir)"),
        (["train", "--worker", "2"], "--workers)"),
        (["train", "digit"], "did you mean 'digits'?"),
        (["train", "digits", "epoch=2"], "did you mean 'epochs'?"),
        (["bench", "launch", "--repetition", "1"], "options: --repetitions)"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_a_typo_gets_the_right_name(arguments: list[str], meant: str) -> None:
    result = run(ALLSTEP, *arguments)
    assert result.returncode == 2
    assert meant in result.stderr
    assert "Traceback" not in result.stderr
