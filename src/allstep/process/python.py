"""Commands that run a module of allstep, without the current folder on Python's search path.

`python -m module` puts the current folder first on `sys.path`. A user who inspects a downloaded
folder often has it as the current folder, and a file `torch.py` or `json.py` there would be
imported instead of the real one. With `-P` (Python 3.11) the search path is that of the installed
command `allstep`. The user's own model factory is still imported from the current folder:
`models.user_factory` adds it for that import alone.
"""

import sys
from pathlib import Path

_PACKAGES = str(Path(__file__).resolve().parents[2])


def run_module(module: str, *arguments: str, executable: str | None = None) -> list[str]:
    """Return the command that runs a module; `executable` defaults to this interpreter."""
    return [executable or sys.executable, *module_flags(module), *arguments]


def module_flags(module: str) -> list[str]:
    """Return the arguments of the interpreter that run a module, without the interpreter itself."""
    return ["-P", "-m", module]


def run_bare(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `main(*arguments)` of a module that needs no installed package.

    Without the search for installed packages (`-S`) Python starts in 20 ms instead of 60;
    environment variables and the current folder have no effect (`-I`). The exit status is the
    return value of `main`.
    """
    start = (
        f"import sys; sys.path.append({_PACKAGES!r}); from {module} import main;"
        " sys.exit(main(*sys.argv[1:]))"
    )
    return [sys.executable, "-I", "-S", "-c", start, *arguments]
