"""Keys and values of a call, as in the table of the module."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import UserError
from allstep.kvstore.rules.key_lists import check_kinds, check_new, values_by_key

KEYS = st.integers(-5, 5) | st.sampled_from(["a", "b", "c"])


@pytest.mark.parametrize(
    ("keys", "values", "found"),
    [
        (3, "a", {3: ["a"]}),
        ("w", ["a", "b"], {"w": ["a", "b"]}),
        ([3, 5], ["a", "b"], {3: ["a"], 5: ["b"]}),
        ([3, 5], [["a", "b"], ("c",)], {3: ["a", "b"], 5: ["c"]}),
        ([3, 5, 3], ["a", "b", "c"], {3: ["a", "c"], 5: ["b"]}),
        ([], [], {}),
    ],
)
def test_the_table(keys: Any, values: Any, found: Any) -> None:
    assert values_by_key("push", keys, values) == found


@given(st.lists(st.tuples(KEYS, st.lists(st.integers(), min_size=1, max_size=3))))
def test_no_value_is_lost(pairs: list[tuple[Any, list[int]]]) -> None:
    keys, values = [key for key, _ in pairs], [found for _, found in pairs]
    found = values_by_key("push", keys, values)
    for key in found:
        assert found[key] == [v for other, listed in pairs if other == key for v in listed]
    assert found.keys() == set(keys)


@pytest.mark.parametrize(
    ("keys", "values", "text"),
    [
        ([1, 2], ["a"], "push: 2 keys and 1 values"),
        ([1, 2], "a", "push: 2 keys and one value"),
        (1.5, "a", "key 1.5 has type float; expected int or str"),
        (True, "a", "key True has type bool"),
    ],
)
def test_lists_that_do_not_match(keys: Any, values: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        values_by_key("push", keys, values)


def test_one_kind_of_key() -> None:
    check_kinds("init", [1, 2], [3])
    check_kinds("init", [], [])
    with pytest.raises(
        UserError, match="key 'a' has type str, but key 1 of this store has type int"
    ):
        check_kinds("init", [1, "a"], [])
    with pytest.raises(
        UserError, match="key 2 has type int, but key 'a' of this store has type str"
    ):
        check_kinds("init", [2], ["a"])


@pytest.mark.parametrize(("keys", "present"), [([1, 1], []), (1, [1]), ([2, 1], [1])])
def test_a_key_is_initialized_once(keys: Any, present: list[int]) -> None:
    with pytest.raises(UserError, match="duplicate init of key 1"):
        check_new("init", keys, present)
