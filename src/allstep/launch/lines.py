"""From the bytes a worker prints to whole lines.

A line ends with a newline. A progress bar redraws itself with carriage returns and may never end its line: of the redraws, the last
one is passed on, at most once a second. A line longer than a megabyte is passed on in pieces.
"""

import time

_REDRAW_SECONDS = 1.0
_LONGEST = 1 << 20


class Lines:
    """Collects one stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._shown = time.monotonic()

    def feed(self, data: bytes) -> list[str]:
        """The lines that are whole now, without their newline."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [_last_redraw(line) for line in whole]
        if b"\r" in self._rest:
            lines += self._redraw()
        elif len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="surrogateescape") for line in lines]

    def end(self) -> list[str]:
        """What was printed without a newline at the end of the stream."""
        rest, self._rest = self._rest, b""
        line = _last_redraw(rest)
        return [line.decode(errors="surrogateescape")] if line else []

    def _redraw(self) -> list[bytes]:
        drawn, _, self._rest = self._rest.rpartition(b"\r")
        line = _last_redraw(drawn)
        now = time.monotonic()
        if not line or now - self._shown < _REDRAW_SECONDS:
            # Not shown: a later redraw, or the end of the line, will say the same or more.
            self._rest = self._rest or (b"\r" + line if line else b"")
            return []
        self._shown = now
        return [line]


def _last_redraw(line: bytes) -> bytes:
    """What a terminal would show in the end of `line`: the text behind its last carriage return that has text behind it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
