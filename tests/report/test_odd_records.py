"""Records of other versions and other hands: whatever stands under a key, the page is made.

A random place of a good record, or of the files beside it, gets a random value. There must be a
page all the same, well formed, with coordinates that are numbers.
"""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from allstep.report import write_report
from support.html_checker import Checker
from support.synthetic_runs import BEGAN, CLASSES, lines, write, write_mistakes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
IS_SOAK = settings().max_examples > 100
FEW = settings() if IS_SOAK else settings(max_examples=20)
FEWER = settings() if IS_SOAK else settings(max_examples=8)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value can be put: every key and every index, however deep."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, each in inner for place in ((*path, key), *places(each, (*path, key)))]


def put(record: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        record = record[key]
    record[path[-1]] = value


def base() -> list[dict[str, Any]]:
    trust = {"trust": {"a": 0.1, "b": 0.2}, "grad_norm": 1.0, "noise_scale": 2.0}
    return lines(epochs=4, per_epoch=3, extra=lambda i: dict(trust))


PLACES = [
    path for path in places(json.loads(json.dumps(base()))) if path[-1] != "kind" and len(path) > 1
]


@FEW
@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=4))
@example([((15, "grad_norm"), 1e308)])
@example([((10, "samples"), -1e308), ((11, "noise_scale"), 1e-320)])
@example([((16, "accuracy"), 3.7), ((-3, "samples"), -1.5)])
@example([((15, "samples"), -1.5)])
@example([((1, "compute", 0), 1e308), ((2, "trust", "a"), 1e308), ((-1, "time"), 1e20)])
def test_there_is_a_page_whatever_stands_in_a_record(
    changes: list[tuple[tuple[Any, ...], Any]],
) -> None:
    made = json.loads(json.dumps(base()))
    for path, value in changes:
        try:
            put(made, path, value)
        except (TypeError, KeyError, IndexError):  # the place went away with an earlier change
            continue
    made[0]["time"] = BEGAN  # a record without a start is no run
    check(made)


@FEWER
@given(st.sampled_from(["mistakes.json", "confusion.json"]), VALUES, VALUES)
def test_there_is_a_page_whatever_stands_in_mistakes(name: str, value: Any, other: Any) -> None:
    whole = {
        "mistakes.json": [
            {
                "file": "0000.png",
                "label": value,
                "predicted": other,
                "probability": value,
                "number": other,
            }
        ],
        "confusion.json": {
            "classes": [value, *CLASSES[1:]],
            "counts": other if isinstance(other, list) else value,
        },
    }
    for content in (value, whole[name]):
        check(lines(epochs=1, per_epoch=1), {name: json.dumps(content)})


def check(made: list[dict[str, Any]], mistakes: dict[str, str] | None = None) -> None:
    with TemporaryDirectory() as folder:
        run = write(Path(folder) / "run", made)
        write_mistakes(run / "mistakes", 1)
        for name, content in (mistakes or {}).items():
            (run / "mistakes" / name).write_text(content)
        page = write_report([run, run], Path(folder) / "page.html", now=BEGAN + 9999).read_text()
    Checker().feed(page)
    figures = re.findall(r'(?:points|style|cx|cy|y1|data-[xy])="([^"]*)"', page)
    assert not [each for each in figures if "nan" in each or "inf" in each]
