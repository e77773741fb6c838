"""Parse transforms in a config or on the command line.

A transform is written as "RandomResizedCrop(224), Flip()", or as a name from `PRESETS`. The text is
parsed as Python syntax and never executed: only known names are allowed, called with literals.

| function | known names | returns |
|---|---|---|
| `spelled` | those of `allstep.data.augment`, for images | a `Transform` |
| `spelled_mix` | Mixup, Cutmix, for whole batches | operations for `Transform(batch=...)` |
| `check_mix` | the same | the parsed calls; it checks them without importing torch |

"none" is an empty chain.
"""

import ast
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from allstep.data import augment
from allstep.data.augment.transform import BatchOperation, Shape, Transform
from allstep.errors import ConfigError, cut, did_you_mean

if TYPE_CHECKING:
    from allstep.data.augment.operation import Operation

PRESETS: Mapping[str, str] = {
    "imagenet": "RandomResizedCrop(224), Flip()",
    "imagenet-eval": "CentreCrop(224)",
    "cifar10": "PadAndCrop(32, pad=4), Flip()",
    "fashion-mnist": "PadAndCrop(28, pad=2), Flip()",
}
MIXES = ("Mixup", "Cutmix")
_MAX_OPERATIONS = 100
"""Maximum number of operations in one chain: each of them costs time for every image."""
_IMAGES = tuple(name for name in augment.__all__ if name != "Operation")


class _Call(NamedTuple):
    """One operation as written in the text."""

    text: str
    name: str
    arguments: list[Any]
    named: dict[str, Any]

    def made(self, home: Any) -> Any:
        """Return the operation, made by the class of this name in module `home`."""
        try:
            return getattr(home, self.name)(*self.arguments, **self.named)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.text}: {error}") from error


def spelled(
    text: str,
    *,
    channels: int = 3,
    shape: Shape | None = None,
    batch: Sequence[BatchOperation] = (),
) -> Transform:
    """Return the transform that `text` describes.

    `channels`, `shape` and `batch` are arguments of `Transform`.
    """
    written = PRESETS.get(text.strip(), text)
    calls = _calls(written, _IMAGES, PRESETS, PRESETS["imagenet"])
    operations: list[Operation] = [call.made(augment) for call in calls]
    return Transform(*operations, batch=batch, channels=channels, shape=shape)


def spelled_mix(text: str) -> list[BatchOperation]:
    """Return the operations on whole batches that `text` describes, such as "Mixup(0.2)"."""
    from allstep.data.augment import mix  # needs torch

    return [call.made(mix) for call in check_mix(text)]


def check_mix(text: str) -> list[_Call]:
    """Return the parsed calls of `text`; raise ConfigError if `spelled_mix` cannot use it."""
    return _calls(text, MIXES, (), "Mixup(0.2), Cutmix(1.0)")


def _calls(
    text: str, known: Collection[str], presets: Collection[str], example: str
) -> list[_Call]:
    if text.strip() == "none":
        return []
    try:
        tree = ast.parse(f"[{text}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{cut(text)!r}: expected operations such as {example!r}") from error
    if not isinstance(tree, ast.List):
        raise ConfigError(f"{cut(text)!r}: expected operations such as {example!r}")
    if len(tree.elts) > _MAX_OPERATIONS:
        found = f"found {len(tree.elts):,}: {cut(text)!r}"
        raise ConfigError(f"expected at most {_MAX_OPERATIONS} operations, {found}")
    return [_call(each, known, presets) for each in tree.elts]


def _call(node: ast.expr, known: Collection[str], presets: Collection[str]) -> _Call:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    text = cut(ast.unparse(node))
    if not isinstance(call.func, ast.Name):
        raise ConfigError(f"{text!r} is not an operation; write it as Name(arguments)")
    name = call.func.id
    if name not in known:
        raise ConfigError(_instead(name, [*known, *presets, "none"]))
    try:
        arguments = [ast.literal_eval(each) for each in call.args]
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{text}: expected plain values in the brackets: numbers, texts, True or False"
        ) from error
    return _Call(text, name, arguments, named)


def _instead(name: str, known: Collection[str]) -> str:
    """Return the error text for an unknown name, with the place or the name to use instead."""
    if name in MIXES:
        return f"{name} works on whole batches: write it in data.mix"
    if name in _IMAGES:
        return f"{name} works on single images: write it in data.augment"
    return f"no operation is called {name!r}; {did_you_mean(name, known)}"
