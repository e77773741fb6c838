"""Pipes are read without waiting and in bounded amounts."""

import fcntl
import os

from allstep.process.pipe import chunks_now


def test_what_is_there_is_read_and_the_end_is_reported() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    assert list(chunks_now(read)) == []
    os.write(write, b"one")
    assert list(chunks_now(read)) == [b"one"]
    os.write(write, b"two")
    os.close(write)
    assert list(chunks_now(read)) == [b"two", b""]
    assert list(chunks_now(read)) == [b""]
    os.close(read)


def test_a_full_pipe_is_read_whole_and_a_writer_without_end_only_so_far() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    capacity = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
    os.write(write, bytes(capacity))
    assert sum(map(len, chunks_now(read))) == capacity
    num_read = 0
    os.write(write, bytes(1 << 16))
    for chunk in chunks_now(read):
        num_read += len(chunk)
        # As much again as was read, for ever.
        os.write(write, chunk)
    assert num_read == 1 << 20
    for descriptor in (read, write):
        os.close(descriptor)
