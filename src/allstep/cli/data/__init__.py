"""`allstep data`: download, pack, inspect and check datasets.

`verbs` has one function per verb and `options` their command-line options. `source` opens the
dataset that SRC names, and `table` prints what `info` and `verify` found.
"""

from allstep.cli.data.verbs import data

__all__ = ["data"]
