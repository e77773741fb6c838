"""Indexes and checksums made now, rather than when a training run needs them (`allstep data
index`).

Opening a source writes the indexes it lacks. TFRecords hold a checksum for each record; files in
folders and tars, idx files and CIFAR-10's do not. For those a CRC32C of each sample can be stored:
it says nothing about damage before, but finds every change after it, until new ones are stored.
Where they cannot be written, that is an error.
"""

from pathlib import Path

from allstep.data.sources.arrays import CifarSource, IdxSource
from allstep.data.sources.folder import FolderSource
from allstep.data.sources.index import Progress
from allstep.data.sources.source import Source
from allstep.data.sources.tar.source import Shard, TarSource
from allstep.data.sources.tfrecord.source import TFRecordSource
from allstep.errors import DataError


def store_checksums(source: Source, where: str | Path, progress: Progress | None = None) -> bool:
    """Stores a CRC32C of each sample of `source`, opened at `where`; False where its format has one
    already."""
    if isinstance(source, IdxSource | CifarSource):
        source.index_checksums(progress)
    elif isinstance(source, FolderSource):
        FolderSource(where, checksum=True, again=True, progress=progress)
    elif isinstance(source, TarSource):
        for shard in source.shards:
            Shard(shard.where, True, progress)
    elif isinstance(source, TFRecordSource):
        return False
    else:
        raise DataError(
            f"{where}: samples of a {type(source).__name__} have no place for checksums"
        )
    return True
