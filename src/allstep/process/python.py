"""Starts Python on a module of ours, without the current folder on its search path.

`python -m module` puts the current folder first on `sys.path`. A user who looks at a downloaded
folder often stands in it, and a file `torch.py` or `json.py` there would be imported instead of the
real one. With `-P` (Python 3.11) the search path is that of the installed command `allstep`. A
model factory of the user's own is imported from the current folder all the same: `models.by_name`
adds it for that import alone.
"""

import sys


def run_module(module: str, *arguments: str, executable: str | None = None) -> list[str]:
    """Return the command that runs a module with arguments. executable: default this interpreter."""
    return [executable or sys.executable, *module_flags(module), *arguments]


def module_flags(module: str) -> list[str]:
    """Return the interpreter's own arguments, where another program puts the interpreter first."""
    return ["-P", "-m", module]
