"""What may stand in the place of a file, and is none."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    # The address of a socket has at most 107 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(here)


def a_folder(path: Path) -> None:
    path.mkdir()


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


ODD = {
    "pipe": a_pipe,
    "socket": a_socket,
    "folder": a_folder,
    "endless device": link_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": link_to("nothing"),
    "terabyte of holes": holes,
}
