"""The pages that map the project: paths and links in them exist.

`docs/architecture.md` names modules, so it goes out of date when one moves; these tests find that.
Each check is a function that returns what is wrong, so that a planted mistake shows that it can
fail.
"""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "allstep"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?<![\w./-])[a-z_][\w.]*(?:/[\w.]+)*/?(?![\w/])")
_DOTTED = re.compile(r"(?<![\w./])allstep(?:\.\w+)+")
_NAME = re.compile(r"_?[A-Z][A-Z_]+|[A-Z][a-z]+[A-Za-z]*")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_ANCHOR = re.compile(r'<a id="([^"]+)"')
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_DECISION = re.compile(r'^- <a id="d(\d+)"></a>\*\*D(\d+)\. [^*]+\*\* \S', re.MULTILINE)


# Paths of modules


def missing_paths(text: str) -> list[str]:
    """Return the module paths in a page's code that do not exist."""
    code = [*_SPAN.findall(_FENCE.sub("", text)), *_FENCE.findall(text)]
    paths = [path for each in code for path in _PATH.findall(each) if _is_path(path)]
    dotted = [name for each in code for name in _DOTTED.findall(each)]
    return [each for each in paths if not _exists(each)] + [
        each for each in dotted if not _is_importable(each)
    ]


def _is_path(text: str) -> bool:
    """Return whether a text is meant as a path of the package: it ends in .py, or starts with a
    package and a slash."""
    first, slash, _ = text.partition("/")
    return text.endswith(".py") or (bool(slash) and first in {"src", "tests", *_packages()})


@cache
def _packages() -> frozenset[str]:
    return frozenset(path.name for path in PACKAGE.iterdir() if path.is_dir())


def _exists(path: str) -> bool:
    """Return whether a file, a folder or, without its ending, a module is there."""
    places = [folder / path for folder in (PACKAGE, ROOT)]
    return any(place.exists() or place.with_name(f"{place.name}.py").exists() for place in places)


def _is_importable(name: str) -> bool:
    """Return whether a dotted name is a package, a module, or a name in the source of one."""
    _, *parts = name.split(".")
    place = PACKAGE
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place = place / f"{parts.pop(0)}.py"
    source = place if place.is_file() else place / "__init__.py"
    return not parts or (
        len(parts) == 1 and bool(re.search(rf"\b{parts[0]}\b", source.read_text()))
    )


def test_every_path_of_the_architecture_exists() -> None:
    assert missing_paths(ARCHITECTURE.read_text()) == []


def test_enough_paths_are_looked_at() -> None:
    found = {
        path
        for span in _SPAN.findall(ARCHITECTURE.read_text())
        for path in _PATH.findall(span)
        if _is_path(path)
    }
    assert {
        "comm/memory/reduce.py",
        "launch/run_state.py",
        "world/value.py",
        "train/task/",
    } <= found
    assert len(found) > 120


@pytest.mark.parametrize(
    "wrong",
    [
        "`comm/memory/reduced.py`",
        "`nowhere/reduce.py`",
        "`reduced.py`",
        "`comm/memories/`",
        "`src/allstep/comm/nowhere`",
        "`allstep.comm.nowhere`",
        "`allstep.train.Watcher`",
        "`allstep.world.World.rank.name`",
        "```\ntrain/step  ->  train/nowhere\n```",
    ],
)
def test_a_wrong_path_is_found(wrong: str) -> None:
    assert len(missing_paths(f"{ARCHITECTURE.read_text()}\n{wrong}\n")) == 1


@pytest.mark.parametrize(
    "right",
    ["`src/allstep/comm`", "`comm/`", "`allstep.comm.init`", "`allstep.data.order`", "`a/b`"],
)
def test_a_right_path_is_not(right: str) -> None:
    assert missing_paths(right) == []


# Names in the code


def unknown_names(text: str) -> list[str]:
    """Return the classes and constants that a page names and the source does not have."""
    named = [span for span in _SPAN.findall(_FENCE.sub("", text)) if _NAME.fullmatch(span)]
    return [name for name in named if name not in _identifiers()]


@cache
def _identifiers() -> frozenset[str]:
    return frozenset(
        name for path in PACKAGE.rglob("*.py") for name in re.findall(r"\w+", path.read_text())
    )


def test_every_name_in_the_architecture_is_in_the_source() -> None:
    assert unknown_names(ARCHITECTURE.read_text()) == []


def test_a_wrong_name_is_found() -> None:
    assert unknown_names("`Exchange` `ExchangeOfNowhere` `_NO_MAKERS`") == [
        "ExchangeOfNowhere",
        "_NO_MAKERS",
    ]


# Links


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Yield the relative links of a page whose file or anchor does not exist."""
    for target in _LINK.findall(_SPAN.sub("", _FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = page.parent / file if file else page
        if not place.exists() or (
            anchor and anchor not in anchors(text if place == page else place.read_text())
        ):
            yield target


def anchors(text: str) -> set[str]:
    """Return what a link to a page can point at: explicit anchors, and headings as GitHub spells
    them."""
    found, counts = set(_ANCHOR.findall(text)), dict[str, int]()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = counts[slug] = counts.get(slug, -1) + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_link_exists(page: Path) -> None:
    assert list(broken_links(page, page.read_text())) == []


@pytest.mark.parametrize(
    "target",
    [
        "nowhere.md",
        "architecture.md#nowhere",
        "#nowhere",
        "../src/allstep/nowhere.py",
        "glossary.md#d5",
    ],
)
def test_a_wrong_link_is_found(target: str) -> None:
    page = ROOT / "docs" / "index.md"
    assert list(broken_links(page, f"{page.read_text()}\n[page]({target})\n")) == [target]


@pytest.mark.parametrize(
    "target",
    ["architecture.md#d5", "architecture.md#path-of-a-gradient", "#start", "https://a.b/c"],
)
def test_a_right_link_is_not(target: str) -> None:
    page = ROOT / "docs" / "index.md"
    assert list(broken_links(page, f"{page.read_text()}\n[page]({target})\n")) == []


def test_anchors_are_spelled_as_github_does() -> None:
    text = "# The launcher: `allstep run`\n## A, and b\n## A, and b\n```\n# no heading\n```\n"
    assert anchors(text) == {"the-launcher-allstep-run", "a-and-b", "a-and-b-1"}


# The index


def unlisted(index: str) -> list[str]:
    """Return the pages of docs/ to which an index has no link."""
    linked = set(_LINK.findall(index))
    return [page.name for page in PAGES if page.name not in linked and page.name != "index.md"]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert unlisted(index) == []
    assert unlisted(index.replace("(soak.md)", "(soak.html)")) == ["soak.md"]


def test_the_readme_links_to_the_index() -> None:
    assert "docs/index.md" in _LINK.findall((ROOT / "README.md").read_text())


# Decisions


def decisions(text: str) -> list[int]:
    """Return the numbers of the decisions that have an entry with an anchor of the same number."""
    return [int(number) for anchor, number in _DECISION.findall(text) if anchor == number]


def test_every_decision_has_an_entry() -> None:
    text = ARCHITECTURE.read_text()
    assert decisions(text) == list(range(1, 26))
    assert 7 not in decisions(text.replace("**D7. ", "**D70. "))


def test_every_decision_that_is_referred_to_exists() -> None:
    texts = [*PACKAGE.rglob("*.py"), *PAGES]
    referred = {
        int(number) for path in texts for number in re.findall(r"\bD(\d{1,2})\b", path.read_text())
    }
    assert referred <= set(decisions(ARCHITECTURE.read_text()))


# Layers


def rows(text: str) -> list[list[str]]:
    """Return the packages of each row of the first diagram after the heading "Layers", planned ones
    left out."""
    diagram = _FENCE.findall(text[text.index("\n## Layers\n") :])[0]
    named = [[name.strip() for name in line.split("|")] for line in diagram.splitlines()[1:-1]]
    built = [sorted(name for name in row if not name.startswith("(")) for row in named]
    return [row for row in built if row]


def inner_rows(text: str, package: str) -> list[list[str]]:
    """Return the rows inside a package, from the table of orders."""
    (row,) = re.findall(rf"^\| `{package}` \| (`[^|]*;[^|]*) \|$", text, re.MULTILINE)
    return [sorted(_SPAN.findall(part)) for part in row.split(";")]


def contract(container: str) -> list[list[str]]:
    """Return the layers that import-linter enforces inside a package, highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = [each["layers"] for each in contracts if container in each.get("containers", ())]
    return [sorted(name.strip() for name in row.split("|")) for row in layers]


def test_the_diagram_is_the_contract() -> None:
    assert rows(ARCHITECTURE.read_text()) == contract("allstep")


@pytest.mark.parametrize("package", ["comm", "parallel", "kvstore", "data", "train"])
def test_the_order_inside_a_package_is_the_contract(package: str) -> None:
    assert inner_rows(ARCHITECTURE.read_text(), package) == contract(f"allstep.{package}")


def test_planned_packages_do_not_exist() -> None:
    planned = re.findall(r"\((\w+)\)", _FENCE.findall(ARCHITECTURE.read_text())[0])
    assert planned
    assert [
        name for name in planned if name in _packages() or (PACKAGE / f"{name}.py").exists()
    ] == []
