"""What `set_gradient_compression` means, and what it changes where nothing is sent.

Between hosts encoded bytes cross the links (`modes.key_wire`). On one host nothing is sent: there
each worker quantizes its gradient before the store receives it, with a residual for each key
(`compression.error_feedback`), so that pushes mean the same. `init` is never compressed.

================================================  =======================  =====================
settings                                          codecs                   as in MXNet
================================================  =======================  =====================
{"type": "2bit"}                                  2bit:0.5                 yes; 0.5 is the default
{"type": "2bit", "threshold": 2}                  2bit:2                   yes
{"type": "1bit", "threshold": 0}                  1bit:0                   yes (MXNet 2.0)
{"type": "1bit"}                                  1bit                     no: with a scale
{"type": "topk:1%"} and all other codecs          topk:1%                  no
{"type": "2bit", "threshold": 2, "pull": "2bit"}  2bit:2, for pulls 2bit   no: its pulls are whole
================================================  =======================  =====================
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from allstep.compression import Codec, ErrorFeedback, codec_from
from allstep.errors import UserError, did_you_mean
from allstep.kvstore.memory.key_memory import StoredKey, short
from allstep.kvstore.rules.codecs import Codecs
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.store_kinds import StoreKind

CALL = "set_gradient_compression"
_DEFAULT_2BIT = 0.5
_SETTINGS = ("type", "threshold", "pull")


class PushCompression:
    """The codecs of a store, and what each key still has to push where nothing is sent.

    sends: whether values leave this host, so that they are encoded on the way.
    """

    def __init__(self, *, sends: bool) -> None:
        self.codecs = Codecs()
        self._sends = sends
        self._feedback: dict[Key, ErrorFeedback] = {}
        self._has_pushed = False

    def choose(self, kind: StoreKind, params: Any) -> Codecs:
        """Compress from now on; return the codecs. params: MXNet's dict."""
        codecs = codecs_of(params)
        if kind.mode == "local":
            raise UserError(
                f"{CALL}: a {kind.name!r} store sends nothing to other workers; remove the call,"
                " or create 'dist_sync' or 'dist_async'"
            )
        if self._has_pushed:
            raise UserError(
                f"{CALL}: after the first push, whose gradient was sent whole; call it before"
            )
        self.codecs, self._feedback = codecs, {}
        return codecs

    def applied(self, stored: StoredKey, gradient: Tensor) -> Tensor:
        """Return what the store receives for a flat gradient of this worker."""
        self._has_pushed = True
        codec = self.codecs.push
        if codec is None:
            return gradient
        if self.codecs.of(stored.dtype).push is None:
            raise UserError(
                f"push of key {stored.key!r}: compression {codec.text} takes float32, and the"
                f" key is {short(stored.dtype)}; put it into a store without compression"
            )
        if self._sends:
            return gradient
        feedback = self._feedback.setdefault(stored.key, ErrorFeedback(codec))
        return feedback.quantize(gradient)

    def check_rows(self, stored: StoredKey) -> None:
        """Raise UserError if sparse gradients cannot be pushed."""
        self._has_pushed = True
        if any(self.codecs):
            raise UserError(
                f"push of key {stored.key!r}: compression {self.codecs.text} takes dense gradients,"
                " and this one is sparse; put the key into a store without compression"
            )


def codecs_of(params: Any) -> Codecs:
    """Return the codecs of MXNet's settings; those of the type "none" are None."""
    if not isinstance(params, Mapping) or "type" not in params:
        raise UserError(
            f"{CALL}({params!r}): expected a dict with the key 'type', such as"
            ' {"type": "2bit", "threshold": 0.5}'
        )
    for name in params:
        if name not in _SETTINGS:
            raise UserError(
                f"{CALL}: unknown setting {name!r}; {did_you_mean(str(name), _SETTINGS)}"
            )
    text, threshold = _text(params["type"]), params.get("threshold")
    if text == "2bit" and threshold is None:
        threshold = _DEFAULT_2BIT
    if threshold is not None:
        if text not in ("1bit", "2bit"):
            raise UserError(
                f"{CALL}: type {text!r} takes no threshold; remove it, or choose '2bit'"
            )
        text = f"{text}:{threshold}"
    pull = codec_from(_text(params.get("pull", "none")), f"{CALL}: pull")
    return Codecs(codec_from(text, f"{CALL}: type"), _for_pulls(pull))


def _text(setting: Any) -> str:
    return str(setting).strip().lower()


def _for_pulls(codec: Codec | None) -> Codec | None:
    """Return a codec for pulls; UserError for one whose steps do not shrink with the differences.

    MXNet's `1bit:t` sends 1 or -1 also where nothing has changed.
    """
    if codec is not None and codec.text.startswith("1bit:"):
        raise UserError(
            f"{CALL}: pull={codec.text} moves each weight by 1 at every pull; choose '1bit', which"
            " has a scale, or '2bit'"
        )
    return codec
