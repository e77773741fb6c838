"""A transform as it is written on the command line: "RandomResizedCrop(224), Flip()", or a name from `PRESETS`.

The text is read as Python's own syntax but not run: only names of `allstep.data.augment`, called with plain values.
"""

import ast
from collections.abc import Mapping
from typing import Any

from allstep.data import augment
from allstep.data.transform import Transform
from allstep.errors import ConfigError, did_you_mean

PRESETS: Mapping[str, str] = {
    "imagenet": "RandomResizedCrop(224), Flip()",
    "imagenet-eval": "CentreCrop(224)",
    "cifar10": "PadAndCrop(32, pad=4), Flip()",
    "fashion-mnist": "PadAndCrop(28, pad=2), Flip()",
}


def spelled(text: str) -> Transform:
    """The transform that `text` spells."""
    written = PRESETS.get(text.strip(), text)
    try:
        tree = ast.parse(f"[{written}]", mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{text!r}: expected operations such as {PRESETS['imagenet']!r}") from error
    assert isinstance(tree, ast.List)
    return Transform(*(_operation(each) for each in tree.elts))


def _operation(node: ast.expr) -> Any:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise ConfigError(f"{ast.unparse(node)!r} is not an operation; write it as Name(arguments)")
    name = call.func.id
    if name not in augment.__all__:
        raise ConfigError(f"no operation is called {name!r}; {did_you_mean(name, [*augment.__all__, *PRESETS])}")
    try:
        arguments = [ast.literal_eval(each) for each in call.args]
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return getattr(augment, name)(*arguments, **named)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{ast.unparse(node)}: {error}") from error
