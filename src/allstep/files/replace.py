"""Writes a file whole or not at all, and through no link.

The content goes to a new file next to its place, under a hidden name that cannot be known before,
and that file is renamed. A reader, or a kill, never sees half of it. What is in the file's place is
replaced: a symbolic link there, or under a temporary name, leads nowhere else.

```
table.md                  the file
.table.md.1f6a09c2.new    the file while it is written; a kill leaves it behind
```
"""

import os
from pathlib import Path

NEW = ".new"
"""How the name of a file under way ends."""


def replace_file(file: Path, content: bytes, mode: int = 0o666) -> None:
    """Write `content` as `file`, in place of what is there; OSError leaves that as it is.

    mode: permissions of the file, less the process's umask.
    """
    new = file.with_name(f".{file.name}.{os.urandom(4).hex()}{NEW}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
        new.replace(file)
    except FileExistsError:
        raise
    except OSError as error:
        new.unlink(missing_ok=True)
        # A write that fails does not say of which file.
        raise OSError(error.errno, error.strerror, str(file)) from error
    except BaseException:
        new.unlink(missing_ok=True)
        raise
