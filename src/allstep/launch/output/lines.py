r"""From the bytes a worker prints to what is logged and to what is printed.

An agent cuts each stream of a worker into pieces; put together they are the stream, byte for byte:

    b"epoch 1\r\n 10%\r 20%\r 30%"    ->    "epoch 1\r\n"   " 10%\r 20%\r"   " 30%"
                                            whole lines     redraws          the rest, at the end

Log files get the pieces as they are. A terminal gets `as_printed` of them: whole lines, since lines
of many ranks take turns there. A progress bar redraws itself with carriage returns and may never
end its line:

| in a stream | printed |
|---|---|
| text that ends with a newline | a line |
| `\r\n` | a newline |
| text behind a carriage return | a line with the text behind the last one; the text before is not printed |
| redraws without a newline | a line, at most once a second or each 64 KB |
| a megabyte without a newline or redraw | a line |
| the end of the stream without a newline | a line |

Bytes that are not UTF-8 are surrogate escapes in a piece.
"""

import time

_REDRAW_SECONDS = 1.0
_MOST_REDRAWS = 1 << 16
_LONGEST = 1 << 20


class LineCutter:
    """Cuts one stream into pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._shown = time.monotonic()

    def feed(self, data: bytes) -> list[str]:
        """Add what the worker has printed; return a piece if there is one to pass on now."""
        data = self._rest + data
        end = self._end_of_piece(data)
        self._rest = data[end:]
        return [data[:end].decode(errors="surrogateescape")] if end else []

    def end(self) -> list[str]:
        """Return what has not been passed on at the end of the stream, if anything."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="surrogateescape")] if rest else []

    def _end_of_piece(self, data: bytes) -> int:
        newline = data.rfind(b"\n") + 1
        held = len(data) - newline
        # Not the last byte: a newline may follow that carriage return.
        if redraw := data.rfind(b"\r", newline, -1) + 1:
            now = time.monotonic()
            if now - self._shown < _REDRAW_SECONDS and held <= _MOST_REDRAWS:
                # Held back: a later redraw, or the end of the line, shows the same or more.
                return newline
            self._shown = now
            return redraw
        return len(data) if held > _LONGEST else newline


def as_printed(piece: str) -> str:
    """Return the lines that a terminal gets of a piece, each with a newline; empty if there is
    none."""
    if "\r" in piece:
        piece = "\n".join(map(_last_redraw, piece.split("\n")))
    return piece if not piece or piece.endswith("\n") else f"{piece}\n"


def _last_redraw(line: str) -> str:
    """What a terminal would show in the end: the text behind the last carriage return that has text
    behind it."""
    return line.rstrip("\r").rpartition("\r")[2]
