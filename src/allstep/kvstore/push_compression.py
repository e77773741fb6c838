"""What `set_gradient_compression` means: gradients are quantized before they reach the store.

Each worker has a residual for each key (`compression.error_feedback`), so what one push drops is
part of the next one. The store receives what a server would decode: the meaning is MXNet's, on one
host and between hosts. No bytes are saved: on one host none are sent, and between hosts the decoded
gradient is. Pulls and `init` are not compressed.

========================================  =========  =============================================
settings                                  codec      as in MXNet
========================================  =========  =============================================
{"type": "2bit"}                          2bit:0.5   yes; 0.5 is the default
{"type": "2bit", "threshold": 2}          2bit:2     yes
{"type": "1bit", "threshold": 0}          1bit:0     yes (MXNet 2.0)
{"type": "1bit"}                          1bit       no: with a scale
{"type": "topk:1%"} and all other codecs  topk:1%    no
========================================  =========  =============================================
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from allstep.compression import Codec, ErrorFeedback, codec_from
from allstep.errors import UserError, did_you_mean
from allstep.kvstore.memory.key_memory import StoredKey, short
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.store_kinds import StoreKind

_CALL = "set_gradient_compression"
_DEFAULT_2BIT = 0.5


class PushCompression:
    """The codec of a store's pushes, and what each key still has to send."""

    def __init__(self) -> None:
        self.codec: Codec | None = None
        self._feedback: dict[Key, ErrorFeedback] = {}
        self._has_pushed = False

    def choose(self, kind: StoreKind, params: Any) -> str:
        """Compress from now on; return the settings as text. params: MXNet's dict."""
        codec = codec_of(params)
        if kind.mode == "local":
            raise UserError(
                f"{_CALL}: a {kind.name!r} store sends nothing to other workers; remove the call,"
                " or create 'dist_sync' or 'dist_async'"
            )
        if self._has_pushed:
            raise UserError(
                f"{_CALL}: after the first push, whose gradient was sent whole; call it before"
            )
        self.codec, self._feedback = codec, {}
        return "none" if codec is None else codec.text

    def applied(self, stored: StoredKey, gradient: Tensor) -> Tensor:
        """Return what the store receives for a flat gradient of this worker."""
        self._has_pushed = True
        if self.codec is None:
            return gradient
        if stored.dtype is not torch.float32:
            raise UserError(
                f"push of key {stored.key!r}: compression {self.codec.text} takes float32, and the"
                f" key is {short(stored.dtype)}; put it into a store without compression"
            )
        feedback = self._feedback.setdefault(stored.key, ErrorFeedback(self.codec))
        return feedback.quantize(gradient)

    def check_rows(self, stored: StoredKey) -> None:
        """Raise UserError if sparse gradients cannot be pushed."""
        self._has_pushed = True
        if self.codec is not None:
            raise UserError(
                f"push of key {stored.key!r}: compression {self.codec.text} takes dense gradients,"
                " and this one is sparse; put the key into a store without compression"
            )


def codec_of(params: Any) -> Codec | None:
    """Return the codec of MXNet's settings; None for the type "none"."""
    if not isinstance(params, Mapping) or "type" not in params:
        raise UserError(
            f"{_CALL}({params!r}): expected a dict with the key 'type', such as"
            ' {"type": "2bit", "threshold": 0.5}'
        )
    for name in params:
        if name not in ("type", "threshold"):
            hint = did_you_mean(str(name), ["type", "threshold"])
            raise UserError(f"{_CALL}: unknown setting {name!r}; {hint}")
    text, threshold = str(params["type"]).strip().lower(), params.get("threshold")
    if text == "2bit" and threshold is None:
        threshold = _DEFAULT_2BIT
    if threshold is not None:
        if text not in ("1bit", "2bit"):
            raise UserError(
                f"{_CALL}: type {text!r} takes no threshold; remove it, or choose '2bit'"
            )
        text = f"{text}:{threshold}"
    return codec_from(text, f"{_CALL}: type")
