"""The source that a packer reads: TFRecords with all their features, any other source unchanged.

A loader reads only image and label. A dataset that is packed again should keep the other features,
too: file names, boxes, texts. All that a record has are stored in `Sample.fields`.
"""

from typing import Any

from allstep.data.sources.source import BadSample, Place, Sample, Source
from allstep.data.sources.tfrecord import example
from allstep.data.sources.tfrecord.source import TFRecordSource


class AllFeatures(Source):
    """The samples of a TFRecord source, with all their further features as fields."""

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
    """Return the source that a packer should read instead of `source`."""
    if isinstance(source, TFRecordSource) and source.layout.features:
        return AllFeatures(source)
    return source


def _plain(values: Any) -> Any:
    """Return the only element of a list of one as bytes; other values unchanged."""
    return bytes(values[0]) if isinstance(values, list) and len(values) == 1 else values
