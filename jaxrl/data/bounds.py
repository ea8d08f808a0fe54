"""Limits on the memory for decoding untrusted files, checked from their headers before decoding."""

import io
import zlib
from collections.abc import Iterable, Sequence

from jaxrl.core.spaces import MOST_NUMBERS
from jaxrl.parallel import memory

# Pillow passes some other formats to external programs, such as PostScript to Ghostscript.
_PICTURES = ("JPEG", "PNG")
_SOME = 1 << 16  # number of bytes to decompress at a time


def check_memory(needed: int, what: str) -> None:
    """Check that `needed` bytes are at most half of the free memory.

    Args:
      needed: number of bytes.
      what: the data that needs the memory, for the error message.

    Raises:
      ValueError: `needed` is more than half of the free memory; the message names `what`.
    """
    free = memory.free_on_host()
    if free is not None and needed > free // 2:
        raise ValueError(
            f"{what} would take {memory.readable(needed)}, more than half of the {memory.readable(free)} of free memory"
        )


def check_pictures(encoded: Iterable[bytes], shape: Sequence[int | None] | None = None) -> None:
    """Check from their headers that encoded images have the expected size and fit in memory together.

    Args:
      encoded: the contents of JPEG or PNG files.
      shape: the expected (height, width) of each image; None instead of either number, or of the tuple, allows any.

    Raises:
      ValueError: an image has another format or size, or more than 2^26 numbers, or all images together are too large.
    """
    from PIL import Image

    needed = 0
    for data in encoded:
        try:
            with Image.open(io.BytesIO(data), formats=_PICTURES) as picture:  # reads only the header
                width, height, bands = *picture.size, len(picture.getbands())
        except Exception as error:  # Pillow raises errors of many types
            said = f"{error!s:.200}".split("<", 1)[0]
            raise ValueError(f"the bytes are not an image in {' or '.join(_PICTURES)} format: {said}") from error
        if height * width * max(bands, 4) > MOST_NUMBERS:
            raise ValueError(f"an image has {height:,} x {width:,} pixels; at most {MOST_NUMBERS // 4:,} are decoded")
        expected = (height, width) if shape is None else tuple(shape[:2])
        if any(want not in (None, found) for want, found in zip(expected, (height, width), strict=True)):
            raise ValueError(f"an image has {height} x {width} pixels, but {expected[0]} x {expected[1]} was declared")
        needed += 4 * height * width * bands
        check_memory(needed, "the images of an episode")


def check_inflated(deflated: Iterable[bytes]) -> None:
    """Check that the decompressed size of all zlib strings together is at most 2^26 numbers of 8 bytes.

    Raises:
      ValueError: the total is larger, or zlib cannot decompress a string.
    """
    needed = 0
    for data in deflated:
        decoder, rest = zlib.decompressobj(), data
        while rest and not decoder.eof:
            try:
                needed += len(decoder.decompress(rest, _SOME))
            except zlib.error as error:
                raise ValueError(str(error)) from error
            rest = decoder.unconsumed_tail
            if needed > MOST_NUMBERS * 8:
                raise ValueError(f"the data decompresses to more than {memory.readable(MOST_NUMBERS * 8)}")
