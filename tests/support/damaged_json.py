"""JSON as a damaged disk or another person may write it, made from a good document and a seed."""

import copy
import json
import random
from typing import Any

RAW = [
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 30,
    "-" + "9" * 5000,
    "[" * 60 + "]" * 60,
    "[" * 100_000,
    '{"a":' * 40_000 + "1" + "}" * 40_000,
    '"\\ud800"',
    '"\\u0000"',
    "1e-320",
    "01",
]
PLAIN: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**40,
        2**63,
        0.5,
        -1e30,
        1e300,
        "",
        "x",
        "../../etc/passwd",
        "²",
        "9",
    ),
    *([], [[]], [1], ["x"], {}, {"a": 1}, {"samples": 1}, "\x1b[2J", "a\nb"),
]
_HOLE = "a hole for raw text"


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index, however deep."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, each in inner for place in ((*path, key), *places(each, (*path, key)))]


def odd(document: Any, seed: int) -> bytes:
    """`document` with one to three odd values, or with odd bytes."""
    dice = random.Random(seed)
    made = json.loads(json.dumps(document))
    if dice.random() < 0.1:
        return dice.choice(RAW).encode()
    if dice.random() < 0.05:
        return json.dumps(dice.choice(PLAIN)).encode()
    for _ in range(dice.randint(1, 3)):
        _change(made, dice)
    text = json.dumps(made)
    while json.dumps(_HOLE) in text:
        text = text.replace(json.dumps(_HOLE), dice.choice(RAW), 1)
    return _bent(text.encode(), dice) if dice.random() < 0.2 else text.encode()


def _change(made: Any, dice: random.Random) -> None:
    # Copies: a list that is put in twice could be put into itself.
    known = places(made)
    if not known:
        return
    *path, last = dice.choice(known)
    for key in path:
        made = made[key]
    if isinstance(made, dict) and dice.random() < 0.2:
        del made[last]
    elif isinstance(made, dict) and dice.random() < 0.1:
        made[dice.choice(["more", "²", "../x", ""])] = copy.deepcopy(dice.choice(PLAIN))
    else:
        made[last] = _HOLE if dice.random() < 0.3 else copy.deepcopy(dice.choice(PLAIN))


def _bent(data: bytes, dice: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or put in."""
    bent = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(bent) + 1)
        how = dice.randrange(4)
        if how == 0 and place < len(bent):
            bent[place] ^= 1 << dice.randrange(8)
        elif how == 1:
            del bent[place : place + dice.randint(1, 50)]
        elif how == 2:
            bent[place:place] = bent[place : place + dice.randint(1, 50)]
        else:
            bent[place:place] = dice.choice(
                [b"\x00", b"\xff\xfe", b"\n", b'"', b"{", b"[", b"\xed\xa0\x80"]
            )
    return bytes(bent)
