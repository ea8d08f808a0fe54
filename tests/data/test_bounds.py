"""What a file says of itself is looked at before it is decoded: pictures, arrays, records of somebody else's."""

import io
import struct
import zlib

import numpy as np
import pytest
from helpers import hostile
from PIL import Image

from jaxrl.core.errors import DatasetError, RunDirectoryError
from jaxrl.data import bounds, features, tfrecord
from jaxrl.data.minari_reader import check_hdf5
from jaxrl.data.staging import Staging
from jaxrl.parallel import memory
from jaxrl.run.loggers import WandbLogger

pytestmark = pytest.mark.faults


def picture(width=3, height=2, kind="PNG", mode="RGB"):
    written = io.BytesIO()
    Image.new(mode, (width, height)).save(written, kind)
    return written.getvalue()


def resized(png, width, height):
    """A PNG whose header says so, with a checksum that fits."""
    header = b"IHDR" + struct.pack(">II", width, height) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


# --- pictures --------------------------------------------------------------------------------------------------------


def test_pictures_that_are_what_they_say_are_decoded():
    bounds.check_pictures([picture(), picture(kind="JPEG")], (2, 3, 3))
    bounds.check_pictures([picture(), picture(5, 7)], (None, None, 3))
    bounds.check_pictures([picture(5000, 3000)])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (resized(picture(), 9000, 9000), "9,000 x 9,000"),
        (picture(kind="GIF", mode="P"), "the bytes are not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "the bytes are not an image"),
        (picture(4, 2), "2 x 4"),
    ],
    ids=["large", "gif", "postscript", "another size"],
)
def test_pictures_that_are_not_are_refused_unseen(data, said):
    with pytest.raises(ValueError, match=said):
        bounds.check_pictures([picture(), data], (2, 3, 3) if said == "2 x 4" else None)


def test_many_pictures_must_fit_together(monkeypatch):
    monkeypatch.setattr(memory, "free_on_host", lambda: 1 << 20)
    bounds.check_pictures([picture(100, 100)] * 4)
    with pytest.raises(ValueError, match="images .* 1 MiB of free memory"):
        bounds.check_pictures([picture(100, 100)] * 5)


def test_a_dataset_of_pictures_that_are_not(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    feature = tfds.features.Image(shape=(5, 4, 3))
    field = features.Field("steps/observation", None, (), "foreign", feature)

    def read(*encoded):
        example = features.new_example()
        example.features.feature["steps/observation"].bytes_list.value.extend(encoded)
        return features.read_example(example.SerializeToString(), [field], "episode 0")

    assert read(picture(4, 5), picture(4, 5))["steps/observation"].shape == (2, 5, 4, 3)
    with hostile.Watch(tmp_path) as watch, pytest.raises(DatasetError, match="steps/observation"):
        read(picture(4, 5), b"%!PS-Adobe-3.0 EPSF-3.0\n")
    assert watch.found == []


def test_compressed_bytes_of_any_shape_must_fit():
    bounds.check_inflated([zlib.compress(bytes(1000))] * 3)
    bomb = zlib.compress(bytes(1 << 20))
    with pytest.raises(ValueError, match="decompresses to more than"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MOST_NUMBERS", 1 << 18)
        bounds.check_inflated([bomb] * 3)
    with pytest.raises(ValueError):
        bounds.check_inflated([b"none"])


# --- records ---------------------------------------------------------------------------------------------------------


# Files here are small enough to be read, should a limit be lost: what is free is said to be less.
def test_a_record_larger_than_memory_is_not_read(tmp_path, monkeypatch):
    """In a file with a hole, which takes next to no room on the disk."""
    header = struct.pack("<Q", 1 << 26)
    with open(tmp_path / "file", "wb") as file:
        file.write(header + tfrecord._checksum(header))
        file.truncate((1 << 26) + 16)
    monkeypatch.setattr(memory, "free_on_host", lambda: 1 << 27)
    with pytest.raises(DatasetError, match="records 0 to 0 would take 128 MiB"):
        with tfrecord.records(tmp_path / "file") as read:
            read(0, 1)


def test_a_file_of_nothing_but_a_hole_is_refused_at_once(tmp_path, monkeypatch):
    check, seen = tfrecord._checksum, []
    monkeypatch.setattr(tfrecord, "_checksum", lambda text: seen.append(text) or check(text))
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 24)
    with hostile.bounded(), pytest.raises(DatasetError, match="record 0 has a wrong checksum"):
        with tfrecord.records(tmp_path / "file"):
            pass
    assert seen == [bytes(8)]


# --- arrays of HDF5 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(10**12,), (1, 10**12)], ids=str)
def test_texts_without_end_are_refused_at_once(shape, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "file", "w") as file:
        chunks = (1,) * (len(shape) - 1) + (1000,)
        file.create_dataset("episode_0/infos/text", shape=shape, chunks=chunks, dtype=h5py.string_dtype())
    with hostile.bounded(5), pytest.raises(ValueError, match="more than the file can contain"):
        check_hdf5(tmp_path / "file", [0])


@pytest.mark.parametrize("how", ["rows of bytes", "texts", "numbers of any length"])
def test_pictures_of_minaris_are_looked_at_however_they_are_stored(how, tmp_path):
    """Or Pillow would be handed them unseen, and hand PostScript to Ghostscript."""
    gymnasium, h5py = pytest.importorskip("gymnasium"), pytest.importorskip("h5py")
    pytest.importorskip("minari")
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n"
    space = gymnasium.spaces.Dict({"camera": gymnasium.spaces.Box(0, 255, (40, 40, 3), np.uint8)})
    numbers = np.frombuffer(postscript, np.uint8)
    with h5py.File(tmp_path / "file", "w") as file:
        group = file.create_group("episode_0/observations")
        if how == "rows of bytes":  # as Minari writes where all pictures are of one length
            group["camera"] = numbers[None]
        elif how == "texts":
            group.create_dataset("camera", data=[postscript], dtype=h5py.string_dtype())
        else:
            group.create_dataset("camera", (1,), h5py.vlen_dtype(np.int8))[0] = numbers.astype(np.int8)
    with pytest.raises(ValueError, match="image"):
        check_hdf5(tmp_path / "file", [0], {"observations": space})
    check_hdf5(tmp_path / "file", [0], {"observations": gymnasium.spaces.Dict({})})


# --- links -----------------------------------------------------------------------------------------------------------


def test_what_lies_where_a_dataset_is_staged_is_not_emptied_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("precious")
    (tmp_path / ".data.partial").symlink_to("elsewhere")
    with pytest.raises(OSError):
        Staging(tmp_path / "data")
    assert (tmp_path / "elsewhere" / "precious").read_text() == "precious"


def test_weights_and_biases_do_not_write_through_a_link(tmp_path, monkeypatch):
    class Package:
        def init(self, **_):
            raise AssertionError("it began")

    monkeypatch.setitem(__import__("sys").modules, "wandb", Package())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "wandb").symlink_to("elsewhere")
    with pytest.raises(RunDirectoryError, match="wandb is a link"):
        WandbLogger("project", directory=tmp_path)
    (tmp_path / "wandb").unlink()
    with pytest.raises(AssertionError, match="it began"):
        WandbLogger("project", directory=tmp_path)
