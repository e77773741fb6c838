#!/usr/bin/env python3
"""Move modules of the package and change every import, string and text that names them.

    python tools/move_modules.py MOVES.tsv [MORE.tsv ...]

A line of a table is `old<TAB>new`, both without the leading `allstep.`. A package that moves takes
along the modules in it that no line names. A module may become a package of the same name
(`comm.group` to `comm.group.process_group`): its own line says where its contents go.

What is changed, in all files that git tracks:

* files, by `git mv`; missing `__init__.py` files are made, empty but for a docstring to fill in;
* `from allstep.a import b`, where b is a module that moves: one statement per new parent, with
  `as b` where the last part of the name changes;
* every other `allstep.a.b` in code, strings, docs and settings, by the longest name that moves;
* paths such as `comm/group/process_group.py` in docs and comments.

Nothing is formatted or sorted: run `ruff check --fix` and `ruff format` afterwards. The layers in
pyproject.toml are changed by hand.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

from folder_docs import FOLDERS

ROOT = Path(
    subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True).stdout.strip()
)
SOURCE = ROOT / "src" / "allstep"
PACKAGE = "allstep"
# Marks a name that is new already: new names may begin with old ones.
DONE = "\0"
NAME = re.compile(rf"(?<![\w./\0]){PACKAGE}((?:\.[A-Za-z_]\w*)+)")
PATH = re.compile(r"(?<![\w/.-])(?P<front>(?:src/)?allstep/)?(?P<path>(?:[a-z_]+/)+[a-z_]+)\.py\b")
SUFFIXES = {".py", ".md", ".toml", ".cfg", ".yaml", ".yml", ".json", ".txt", ".sh", ""}


def read_moves(tables: list[str]) -> dict[str, str]:
    moves: dict[str, str] = {}
    for table in tables:
        for line in Path(table).read_text().splitlines():
            old, _, new = line.strip().partition("\t")
            if new and old != "old module":
                moves[old] = new
    return moves


def modules() -> dict[str, Path]:
    """Every module by its name; a package is its `__init__.py`."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def with_contents(moves: dict[str, str], known: dict[str, Path]) -> dict[str, str]:
    """The moves, and those of modules that go with their package."""
    whole = dict(moves)
    packages = {old for old in moves if known[old].name == "__init__.py"}
    for name in known:
        if name in moves:
            continue
        parents = [parent for parent in packages if name.startswith(f"{parent}.")]
        if parents:
            parent = max(parents, key=len)
            whole[name] = moves[parent] + name[len(parent) :]
    return whole


def new_name(name: str, moves: dict[str, str]) -> str:
    """`name` (of a module or of something in one) by the longest part of it that moves."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        head = ".".join(parts[:count])
        if head in moves:
            return ".".join([moves[head], *parts[count:]])
    return name


def move_files(moves: dict[str, str], known: dict[str, Path]) -> None:
    """In two steps, since a new file may need a folder where an old file is."""
    staged = []
    for number, (old, new) in enumerate(moves.items()):
        path = known[old]
        aside = SOURCE / f"_moving_{number}.py"
        git("mv", path, aside)
        staged.append((aside, target_of(old, new, path)))
    for path in [*SOURCE.rglob("*")]:
        if path.is_dir() and path.name == "__pycache__":
            for each in path.iterdir():
                each.unlink()
            path.rmdir()
    for aside, target in staged:
        target.parent.mkdir(parents=True, exist_ok=True)
        git("mv", aside, target)
    for folder in {parent for _, target in staged for parent in target.relative_to(SOURCE).parents}:
        start = SOURCE / folder / "__init__.py"
        if not start.exists():
            name = ".".join(start.parent.relative_to(SOURCE).parts)
            start.write_text(f'"""{FOLDERS[name]}\n"""\n')
            git("add", start)


def target_of(old: str, new: str, path: Path) -> Path:
    target = SOURCE.joinpath(*new.split("."))
    return target / "__init__.py" if path.name == "__init__.py" else target.with_suffix(".py")


def git(*arguments: object) -> None:
    subprocess.run(["git", *map(str, arguments)], cwd=ROOT, check=True)


def changed_imports(text: str, moves: dict[str, str], known: dict[str, Path]) -> str:
    """Rewrite `from allstep.a import b` where b is a module that moves."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()
    edits = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        if node.module.partition(".")[0] != PACKAGE:
            continue
        base = node.module.partition(".")[2]
        full = {alias.name: f"{base}.{alias.name}".strip(".") for alias in node.names}
        if not any(full[alias.name] in moves for alias in node.names):
            continue
        statements = []
        for alias in node.names:
            if full[alias.name] in moves:
                parent, _, last = moves[full[alias.name]].rpartition(".")
                module = ".".join(filter(None, [PACKAGE, parent]))
            else:
                module = ".".join(filter(None, [PACKAGE, new_name(base, moves) if base else ""]))
                last = alias.name
            called = alias.asname or alias.name
            named = last if last == called else f"{last} as {called}"
            statements.append(f"from {DONE}{module} import {named}")
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        edits.append((begin, end, f"\n{' ' * node.col_offset}".join(statements)))
    for begin, end, statement in sorted(edits, reverse=True):
        data = data[:begin] + statement.encode() + data[end:]
    return data.decode()


def changed_text(text: str, moves: dict[str, str]) -> str:
    def rename(found: re.Match[str]) -> str:
        return f"{DONE}{PACKAGE}.{new_name(found[1][1:], moves)}"

    def repath(found: re.Match[str]) -> str:
        old = found["path"].replace("/", ".")
        if old not in moves:
            return found[0]
        return f"{DONE}{found['front'] or ''}{moves[old].replace('.', '/')}.py"

    return PATH.sub(repath, NAME.sub(rename, text)).replace(DONE, "")


def main() -> None:
    known = modules()
    moves = read_moves(sys.argv[1:])
    unknown = sorted(set(moves) - set(known))
    if unknown:
        sys.exit(f"no such modules: {', '.join(unknown)}")
    moves = with_contents(moves, known)
    taken = [new for old, new in moves.items() if new in known and new not in moves]
    if taken or len(set(moves.values())) < len(moves):
        sys.exit(f"targets that exist or are named twice: {taken}")
    move_files(moves, known)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in listed:
        path = ROOT / name
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        made = changed_imports(text, moves, known) if path.suffix == ".py" else text
        made = changed_text(made, moves)
        if made != text:
            path.write_text(made)
    print(f"{len(moves)} modules moved; left in place: {len(known) - len(moves)}")


if __name__ == "__main__":
    main()
