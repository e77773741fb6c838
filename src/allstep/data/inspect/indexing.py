"""Build indexes and checksums before a training run needs them (`allstep data index`).

Opening a source writes the indexes that are missing. A TFRecord file has a checksum per record;
class folders, tar files, idx files and CIFAR-10's files have none. For these, a CRC32C of each
sample can be stored. It cannot detect earlier damage, but detects every later change, until new
checksums are stored. It is an error if they cannot be written.
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
    """Store a CRC32C of each sample of `source`, which was opened at `where`.

    Return False, and store none, if its format has checksums. Raise DataError for a source without
    files. `progress` is called with (name, done, total).
    """
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
        raise DataError(f"{where}: a {type(source).__name__} cannot store checksums")
    return True
