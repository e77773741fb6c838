"""A record that is read while it is written, against `runlog.read` of the same file."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from allstep import runlog
from allstep.study.tail import Follower

LINES = st.sampled_from(
    [
        b'{"kind": "start", "time": 1}\n',
        b'{"kind": "step", "time": 2, "samples": 10}\n',
        b'{"kind": "later", "time": 2}\n',
        b'{"kind": 3}\n',
        b"[1]\n",
        b"\n",
        b'{"torn\n',
        '{"kind": "event", "text": "ä"}\n'.encode(),
        b'{"kind": "end"}\n',
        b'{"kind": "step"',
    ]
)


@settings(max_examples=25)
@given(st.lists(LINES, max_size=12), st.lists(st.integers(0, 200), max_size=8))
def test_however_it_is_cut(written: list[bytes], cuts: list[int]) -> None:
    text = b"".join(written)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        follower = Follower(file)
        assert follower.record() == runlog.RunRecord()
        for end in [*sorted(cuts), len(text)]:
            file.write_bytes(text[:end])
            assert follower.record() == runlog.read(file)
        file.write_bytes(b"")
        assert follower.record() == runlog.RunRecord()
