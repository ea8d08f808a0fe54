"""TFRecord files: against another writer of them, and damage."""

import numpy as np
import pytest
from tensorboardX.record_writer import RecordWriter

from jaxrl.core.errors import DatasetError
from jaxrl.data import tfrecord


def written(path, records):
    writer = tfrecord.TfRecordWriter(path)
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.mark.parametrize("buffer", [2, 1 << 20])
def test_the_files_are_those_of_another_writer(tmp_path, monkeypatch, buffer):
    monkeypatch.setattr(tfrecord, "_BUFFER", buffer)
    rng = np.random.default_rng(0)
    records = [rng.bytes(n) for n in (0, 1, 63, 64, 65, 1000, 70_000)]
    path = written(tmp_path / "ours", records)
    theirs = RecordWriter(str(tmp_path / "theirs"))
    for record in records:
        theirs.write(record)
    theirs.close()
    assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
    with tfrecord.records(path) as read:
        assert read(0, 7) == records and read(3, 5) == records[3:5] and read(6, 7) == records[6:]
        with pytest.raises(DatasetError, match="records 6 to 7 .*has only 7"):
            read(6, 8)


def test_every_bit_counts(tmp_path):
    records = [b"first", b"the second"]
    whole = written(tmp_path / "whole", records).read_bytes()
    cut = [whole[:length] for length in range(1, len(whole))]
    number = int.from_bytes(whole)
    flipped = [(number ^ 1 << bit).to_bytes(len(whole)) for bit in range(8 * len(whole))]
    for place, damaged in enumerate(cut + flipped):
        path = tmp_path / str(place)
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match="cannot be read"), tfrecord.records(path) as read:
            read(0, 2)


def test_a_file_that_changed_is_read_anew(tmp_path):
    path = tmp_path / "file"
    for records in ([b"one"], [b"two", b"three"], []):
        path.unlink(missing_ok=True)  # a writer makes a new file, and never writes to one that is there
        written(path, records)
        with tfrecord.records(path) as read:
            assert read(0, len(records)) == records
