"""Starts Python on a module of ours, without the current folder on its search path.

`python -m module` puts the current folder first on `sys.path`. A user who looks at a downloaded
folder often stands in it, and a file `torch.py` or `json.py` there would be imported instead of the
real one. With `-P` (Python 3.11) the search path is that of the installed command `allstep`. A
model factory of the user's own is imported from the current folder all the same: `models.by_name`
adds it for that import alone.
"""

import sys
from pathlib import Path

_PACKAGES = str(Path(__file__).resolve().parents[2])


def run_module(module: str, *arguments: str, executable: str | None = None) -> list[str]:
    """Return the command that runs a module with arguments. executable: default this interpreter."""
    return [executable or sys.executable, *module_flags(module), *arguments]


def module_flags(module: str) -> list[str]:
    """Return the interpreter's own arguments, where another program puts the interpreter first."""
    return ["-P", "-m", module]


def run_bare(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `main(*arguments)` of a module that needs no installed package.

    Without the search for installed packages (`-S`) Python starts in 20 ms instead of 60; variables
    of the environment and the current folder have no effect (`-I`). The exit status is what `main`
    returns.
    """
    start = (
        f"import sys; sys.path.append({_PACKAGES!r}); from {module} import main;"
        " sys.exit(main(*sys.argv[1:]))"
    )
    return [sys.executable, "-I", "-S", "-c", start, *arguments]
