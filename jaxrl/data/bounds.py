"""What decoding a file of somebody else's may take, found from headers before anything is decoded."""

import io
import zlib
from collections.abc import Iterable, Sequence

from jaxrl.core.spaces import MOST_NUMBERS
from jaxrl.parallel import memory

# Pillow would hand others to other programs: PostScript to Ghostscript.
_PICTURES = ("JPEG", "PNG")
_SOME = 1 << 16  # bytes that are inflated at once


def check_memory(needed: int, what: str) -> None:
    """Whether there is room.

    Raises:
      ValueError: there is not, which the message says of `what`.
    """
    free = memory.free_on_host()
    if free is not None and needed > free // 2:
        raise ValueError(f"{what} takes {memory.readable(needed)} of memory, where {memory.readable(free)} are free")


def check_pictures(encoded: Iterable[bytes], shape: Sequence[int | None] | None = None) -> None:
    """Whether these are pictures that decode to what their headers say, and fit into memory together.

    Args:
      encoded: JPEG or PNG each.
      shape: the height and width that each has; None, or None in place of one: any.

    Raises:
      ValueError: one is of another format or size, has more than 2^26 numbers, or together they are too large.
    """
    from PIL import Image

    needed = 0
    for data in encoded:
        try:
            with Image.open(io.BytesIO(data), formats=_PICTURES) as picture:  # reads the header alone
                width, height, bands = *picture.size, len(picture.getbands())
        except Exception as error:  # Pillow raises what it likes
            said = f"{error!s:.200}".split("<", 1)[0]
            raise ValueError(f"it is no picture in {' or '.join(_PICTURES)}: {said}") from error
        if height * width * max(bands, 4) > MOST_NUMBERS:
            raise ValueError(f"a picture has {height:,} x {width:,} pixels; at most {MOST_NUMBERS // 4:,} are decoded")
        expected = (height, width) if shape is None else tuple(shape[:2])
        if any(want not in (None, found) for want, found in zip(expected, (height, width), strict=True)):
            raise ValueError(
                f"a picture has {height} x {width} pixels where {expected[0]} x {expected[1]} were promised"
            )
        needed += 4 * height * width * bands
        check_memory(needed, "the pictures of an episode")


def check_inflated(deflated: Iterable[bytes]) -> None:
    """Whether what zlib makes of these fits into memory together.

    Raises:
      ValueError: it does not, or zlib cannot read one.
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
                raise ValueError(f"it decompresses to more than {memory.readable(MOST_NUMBERS * 8)}")
