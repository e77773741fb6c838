"""What a packer reads: TFRecords with all their features, any other source as it is.

A loader needs image and label and looks for nothing else. A set that is packed anew should keep
the rest, too: file names, boxes, texts. They go into `Sample.fields`, whichever of them a record
happens to have.
"""

from typing import Any

from allstep.data.sources.source import BadSample, Place, Sample, Source
from allstep.data.sources.tfrecord import example
from allstep.data.sources.tfrecord.source import TFRecordSource


class AllFeatures(Source):
    """The samples of a TFRecord source with every other feature of theirs as a field."""

    def __init__(self, source: TFRecordSource) -> None:
        self._layout = source.layout
        self._records = TFRecordSource([shard.where for shard in source.shards], {})
        self.classes, self.labeling = source.classes, source.labeling

    def __len__(self) -> int:
        return len(self._records)

    def read(self, number: int) -> Sample:
        record = self._records.read(number).data
        try:
            sample = self._layout.sample(record)
            others = example.decode(record)
        except ValueError as error:
            raise BadSample(number, self.place(number), str(error)) from error
        mine = self._layout.own
        return Sample(
            sample.data,
            sample.target,
            {name: _plain(v) for name, v in others.items() if name not in mine},
        )

    def place(self, number: int) -> Place:
        return self._records.place(number)

    def close(self) -> None:
        self._records.close()


def with_all_features(source: Source) -> Source:
    """The source that a packer should read instead of `source`."""
    return (
        AllFeatures(source)
        if isinstance(source, TFRecordSource) and source.layout.features
        else source
    )


def _plain(values: Any) -> Any:
    """One value of bytes as itself; everything else as it is."""
    return bytes(values[0]) if isinstance(values, list) and len(values) == 1 else values
