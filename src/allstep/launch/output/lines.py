r"""Cuts the output of a worker into chunks, for log files and for the terminal.

The agent cuts each stream of a worker into chunks; joined, they are the stream, byte for byte:

    b"epoch 1\r\n 10%\r 20%\r 30%"    ->    "epoch 1\r\n"   " 10%\r 20%\r"   " 30%"
                                            whole lines     redraws          the rest, at the end

Log files get the chunks unchanged. A terminal gets `as_printed` of them: whole lines, since lines
of many ranks alternate there. A progress bar redraws itself with carriage returns and may never end
its line:

| in a stream | printed |
|---|---|
| text that ends with a newline | a line |
| `\r\n` | a newline |
| text behind a carriage return | a line with only the text behind the last carriage return |
| redraws without a newline | a line, at most once a second or every 64 KB |
| a megabyte without a newline or redraw | a line |
| the end of the stream without a newline | a line |

Bytes that are not UTF-8 are surrogate escapes in a chunk.
"""

import time

_REDRAW_SECONDS = 1.0
_MAX_REDRAW_BYTES = 1 << 16
_MAX_LINE = 1 << 20


class LineCutter:
    """Cuts one stream into chunks."""

    def __init__(self) -> None:
        self._rest = b""
        self._shown = time.monotonic()

    def feed(self, data: bytes) -> list[str]:
        """Add output of the worker; return a list with one chunk to send now, or an empty list."""
        data = self._rest + data
        end = self._end_of_chunk(data)
        self._rest = data[end:]
        return [data[:end].decode(errors="surrogateescape")] if end else []

    def end(self) -> list[str]:
        """Return the rest at the end of the stream, as a list of one chunk or none."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="surrogateescape")] if rest else []

    def _end_of_chunk(self, data: bytes) -> int:
        """Return the number of bytes to send now."""
        newline = data.rfind(b"\n") + 1
        held = len(data) - newline
        # The last byte is excluded: a newline may follow that carriage return.
        if redraw := data.rfind(b"\r", newline, -1) + 1:
            now = time.monotonic()
            if now - self._shown < _REDRAW_SECONDS and held <= _MAX_REDRAW_BYTES:
                # Hold it back: a later redraw, or the end of the line, shows the same or more.
                return newline
            self._shown = now
            return redraw
        return len(data) if held > _MAX_LINE else newline


def as_printed(chunk: str) -> str:
    """Return the lines of a chunk for a terminal, each with a newline; "" if there is none."""
    if "\r" in chunk:
        chunk = "\n".join(map(_last_redraw, chunk.split("\n")))
    return chunk if not chunk or chunk.endswith("\n") else f"{chunk}\n"


def _last_redraw(line: str) -> str:
    """Return what a terminal would finally show: the text behind the last carriage return."""
    return line.rstrip("\r").rpartition("\r")[2]
