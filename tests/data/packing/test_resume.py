"""A packing that was stopped resumes, to the same bytes; the command `allstep data pack`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.data import NAMED, find, load
from allstep.data.opening import open_source
from allstep.data.packing.journal import opened
from allstep.errors import DataError
from support.image_folders import encoded
from support.packed import NUM, packed, shards

KILLED = """
import os, signal, sys
from pathlib import Path
from allstep.data.packing import pack as packing
from allstep.data.packing import journal
from allstep.data.opening import open_source
from allstep.data.packing.pack import pack
from allstep.data.packing.shard_plan import Options
folder, target, when, shards = sys.argv[1:]
packing._MAX_IN_CHUNK = 1
def die(done, total):
    if done >= int(when) > 0:
        os.kill(os.getpid(), signal.SIGKILL)
# Between the rename of a shard and its line in the journal.
if int(when) < 0:
    journal.Journal.add = lambda self, done: os.kill(os.getpid(), signal.SIGKILL)
options = Options("x", shard_samples=int(shards), max_side=20, shuffle=3)
pack(open_source(folder), folder, Path(target), options, jobs=1, progress=die)
"""


class TestStopped:
    @pytest.mark.usefixtures("processes")
    @pytest.mark.soak(1)
    @pytest.mark.parametrize(
        "when", [-1, *range(1, NUM + 1)] if os.environ.get("ALLSTEP_SOAK") else [-1, 3, 17]
    )
    def test_killed_and_resumed_it_is_the_same(
        self, folder: Path, tmp_path: Path, when: int
    ) -> None:
        command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "out"), str(when), "5"]
        assert subprocess.run(command, check=False, timeout=50).returncode == -signal.SIGKILL
        options = {"shard_samples": 5, "max_side": 20, "shuffle": 3}
        outcome = packed(folder, tmp_path / "out", **options)
        packed(folder, tmp_path / "whole", **options)
        assert shards(tmp_path / "out") == shards(tmp_path / "whole")
        assert outcome.num_samples == NUM
        assert outcome.num_before == sum(end < when for end in (4, 9, 14, 19, 24))
        assert not list((tmp_path / "out").glob(".*.part"))

    def test_ctrl_c_leaves_nothing_half(self, folder: Path, tmp_path: Path) -> None:
        def stop(done: int, total: int) -> None:
            if done == 12:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            packed(folder, tmp_path / "out", shard_samples=6, progress=stop)
        assert list(shards(tmp_path / "out")) == ["x-00000-of-00004.tfrecord"]
        assert not list((tmp_path / "out").glob(".*.part"))
        assert packed(folder, tmp_path / "out", shard_samples=6).num_before == 1
        packed(folder, tmp_path / "whole", shard_samples=6)
        assert shards(tmp_path / "out") == shards(tmp_path / "whole")

    def test_a_cut_line_of_the_journal(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "out", shard_samples=6)
        journal = tmp_path / "out" / "pack.jsonl"
        journal.write_bytes(journal.read_bytes()[:-5])
        assert packed(folder, tmp_path / "out", shard_samples=6).num_before == 3
        assert packed(folder, tmp_path / "out", shard_samples=6).num_before == 4

    def test_a_shard_that_was_deleted_is_packed_again(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "out", shard_samples=6)
        before = shards(tmp_path / "out")
        (tmp_path / "out" / "x-00002-of-00004.tfrecord").unlink()
        assert packed(folder, tmp_path / "out", shard_samples=6).num_before == 3
        assert shards(tmp_path / "out") == before

    def test_other_options_or_another_source(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "out")
        with pytest.raises(
            DataError, match=r"other options \(max_side None, now 20\); give --overwrite"
        ):
            packed(folder, tmp_path / "out", max_side=20)
        (folder / "cat" / "000.jpg").write_bytes(encoded(99))
        with pytest.raises(DataError, match="which has changed since; give --overwrite"):
            packed(folder, tmp_path / "out")
        assert packed(folder, tmp_path / "out", max_side=20, overwrite=True).num_samples == NUM
        assert packed(folder, tmp_path / "out", max_side=20).num_before == 1

    def test_two_at_once(self, folder: Path, tmp_path: Path) -> None:
        with (
            opened(tmp_path / "out"),
            pytest.raises(DataError, match="another process is packing into it"),
        ):
            packed(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_folder_with_other_files(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("x")
        with pytest.raises(DataError, match=r"holds other files \(thesis.tex\)"):
            packed(folder, tmp_path / "out", overwrite=True)

    @pytest.mark.usefixtures("processes")
    def test_a_full_disk(self, folder: Path, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        mounting = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=56k", "tmpfs", str(disk)],
            capture_output=True,
            check=False,
        )
        if mounting.returncode:
            pytest.skip("no permission to mount a small disk")
        try:
            with pytest.raises(
                DataError, match=r"the disk is full.*resumes with the shard that did not fit"
            ):
                packed(folder, disk / "out", raw=True, shard_samples=6)
            assert not list((disk / "out").glob(".*.part"))
            assert 0 < len(shards(disk / "out")) < 4
            subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
            assert packed(folder, disk / "out", raw=True, shard_samples=6).num_before > 0
            packed(folder, tmp_path / "whole", raw=True, shard_samples=6)
            assert shards(disk / "out") == shards(tmp_path / "whole")
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


class TestTheCommand:
    def invoke(self, *arguments: object) -> Result:
        return CliRunner().invoke(app, ["data", "pack", *map(str, arguments)])

    def test_twice(self, folder: Path, tmp_path: Path) -> None:
        options = ("--max-side", 20, "--shuffle", "--seed", 3, "--shard-samples", 8, "-j", 2)
        arguments = (folder, tmp_path / "out", *options)
        outcome = self.invoke(*arguments)
        assert outcome.exit_code == 0, outcome.output
        assert "out: 24 samples in 3 shards" in outcome.stdout
        assert "24 samples in 3 shards, 3 of them before" in self.invoke(*arguments).stdout
        assert list(shards(tmp_path / "out")) == [
            f"out-0000{i}-of-00003.tfrecord" for i in range(3)
        ]
        packed(folder, tmp_path / "same", max_side=20, shuffle=3, shard_samples=8)
        assert list(shards(tmp_path / "same").values()) == list(shards(tmp_path / "out").values())

    def test_a_dataset_by_name(self, tmp_path: Path) -> None:
        assert "360 samples" in self.invoke("digits", tmp_path / "out", "--raw", "--test").stdout
        there = open_source(str(tmp_path / "out"))
        assert there.classes == tuple("0123456789")
        images = load(find(NAMED["digits"])).test
        for number in (0, 100, 359):
            np.testing.assert_array_equal(there.read(number).data[..., 0], images.images[number])
            assert there.read(number).target == images.labels[number]

    def test_bad_samples_are_reported(self, folder: Path, tmp_path: Path) -> None:
        (folder / "cat" / "003.jpg").write_bytes(b"no")
        outcome = self.invoke(folder, tmp_path / "out")
        assert "1 bad samples left out" in outcome.stderr
        assert (tmp_path / "out" / "quarantine.jsonl").exists()
        (folder / "cat" / "003.jpg").write_bytes(encoded(3))
        assert self.invoke(folder, tmp_path / "out", "--overwrite").exit_code == 0
        assert not (tmp_path / "out" / "quarantine.jsonl").exists()

    @pytest.mark.parametrize(
        "arguments",
        [
            ["{tmp}/none", "{tmp}/out"],
            ["{tmp}/photos", "{tmp}/photos/out"],
            ["{tmp}/photos", "{tmp}/o", "--to", "rar"],
        ],
    )
    def test_bad_input_is_one_line(
        self, folder: Path, tmp_path: Path, arguments: list[str]
    ) -> None:
        outcome = self.invoke(*(each.format(tmp=tmp_path) for each in arguments))
        assert getattr(outcome.exception, "exit_code", None) == 2
        assert "\n" not in str(outcome.exception)
        assert not (tmp_path / "out").exists()
