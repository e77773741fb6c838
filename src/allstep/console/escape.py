"""Escapes untrusted text for printing: names of files and classes, error texts of libraries.

A file name on Linux is any bytes but `/` and NUL. Printed unchanged, it can move the cursor, clear
the screen, set the window's title, start a line that looks like one of allstep's, reverse the order
of the following text, or raise an error because it is not text at all:

| in a name | unescaped, it would | printed as |
|---|---|---|
| ESC, BEL, DEL and the other C0 and C1 controls | obey | `\\x1b`, `\\x07`, `\\x7f`, `\\x9b` |
| line feed, carriage return, tab | start a line, write over it, jump | `\\n`, `\\r`, `\\t` |
| U+2028, U+2029 and the bidi controls | break or reorder the line | `\\u2028`, `\\u202e` |
| bytes that are not UTF-8 (lone surrogates in Python) | raise UnicodeEncodeError | `\\xff` |

Text is escaped where it leaves the program, not where it enters it: inside, a name stays the file's
own and can be opened. Backslashes stay single, so a name with a real backslash looks like an
escaped one; neither can be pasted into a shell unquoted.

The launcher does not escape the output of workers: progress bars need control characters.
"""

import re
import sys

# Joiners (U+200C, U+200D) are not included: Persian names and emoji need them, and they do no harm.
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[\x00-\x1f\x7f-\x9f\u2028\u2029{_BIDI}\ud800-\udfff]")
# A line break of the message itself: the next line is indented, so it cannot imitate a message.
_INDENTED = re.compile(r"\n(?= )")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escaped(text: str, keep: str = "") -> str:
    """Return `text` as one line without control characters, which are escaped.

    keep: characters that stay unescaped (default: none).
    """
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def escaped_block(text: str) -> str:
    """Return a message with everything escaped but line breaks before an indented line."""
    return "\n".join(map(escaped, _INDENTED.split(text)))


def print_line(text: str) -> None:
    """Print a line on standard output and flush it."""
    print(escaped_block(text), flush=True)


def print_notice(text: str, source: str = "allstep") -> None:
    """Print `allstep: text` on standard error and flush it.

    source: the name in front of the colon, such as `allstep run`.
    """
    print(f"{source}: {escaped_block(text)}", file=sys.stderr, flush=True)


def _escape(character: str) -> str:
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    # A byte that is not UTF-8 comes from the file system as U+DC80 to U+DCFF.
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
