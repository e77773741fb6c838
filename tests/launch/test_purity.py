"""The modules that decide use no clock, socket or process."""

import ast
from pathlib import Path
from types import ModuleType

import pytest

from allstep.launch import cause as cause_module
from allstep.launch import restart, run_events, run_state


@pytest.mark.parametrize("module", [cause_module, restart, run_events, run_state])
def test_what_decides_has_no_clock_no_socket_and_no_process(module: ModuleType) -> None:
    """It imports nothing that could give it one. Of `signal`, it uses the numbers."""
    imported = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    pure = {
        "allstep.launch",
        *(f"allstep.launch.{name}" for name in ("cause", "restart", "run_events")),
    }
    assert imported <= pure | {"collections.abc", "dataclasses", "json", "re", "signal", "typing"}
    calls = {
        node.attr
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if is_of_signal(node)
    }
    assert all(name.startswith("SIG") or name == "Signals" for name in calls)


def is_of_signal(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "signal"
    )
