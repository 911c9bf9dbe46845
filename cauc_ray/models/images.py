"""Images from encoded bytes or pixels, as Pillow reads them."""

from __future__ import annotations

import base64
import io
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cauc_ray.errors import DataError, one_line
from cauc_ray.models.answers import Batch, Unusable, parted, require_columns

# Not all that Pillow reads: it passes EPS files, which are programs, to Ghostscript.
Image.init()
FORMATS = tuple(
    name for name in ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP") if name in Image.OPEN
)
# Preprocessing scales an image by its shorter side: 1 x 60,000 pixels would become 10 GB.
MAX_ASPECT = 100
# The EXIF tag of how a camera was held; 1 is upright.
ORIENTATION = 0x0112


class ImageError(DataError):
    """An image that cannot be used."""


def read_images(
    batch: Batch, preprocess: Callable[[Image.Image], Any], apply: Callable[..., Iterable[Any]] = map
) -> tuple[dict[int, Any], dict[int, str]]:
    """Return a batch's images, preprocessed, by row, and why the other rows have none.

    apply: the map that reads them. Raises DataError without a column `image`.
    """
    return _read(batch, lambda image: preprocess(decode_image(image)), apply)


def read_data_uris(batch: Batch, apply: Callable[..., Iterable[Any]] = map) -> tuple[dict[int, str], dict[int, str]]:
    """Return a batch's images as data URIs by row, and why the other rows have none.

    Args:
        batch: Columns, with one named `image`.
        apply: The map that reads them.
    """
    return _read(batch, _data_uri, apply)


def _read(
    batch: Batch, read: Callable[[Any], Any], apply: Callable[..., Iterable[Any]]
) -> tuple[dict[int, Any], dict[int, str]]:
    require_columns(batch, "image")

    def read_or_fail(image: Any) -> Any:
        try:
            return read(image)
        except ImageError as error:
            return Unusable(error)

    return parted(dict(enumerate(apply(read_or_fail, batch["image"]))))


def _data_uri(image: Any) -> str:
    """Return an image as decode_image reads it: its own bytes if every server reads the same from them, else a PNG."""
    pixels, buffer = decode_image(image), io.BytesIO()
    kind, content = "png", b""
    if isinstance(image, bytes):
        with _opened(image) as header:
            is_upright = header.getexif().get(ORIENTATION, 1) == 1
            if header.format in ("JPEG", "PNG") and header.mode in ("RGB", "L") and is_upright:
                kind, content = header.format.lower(), b"" if "transparency" in header.info else image
    if not content:
        pixels.save(buffer, "PNG")
        kind, content = "png", buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def decode_image(image: Any) -> Image.Image:
    """Return an image in RGB, upright, from encoded bytes, or from uint8 (H, W, 3) or (H, W).

    An image is turned as its EXIF orientation says, as people see it. Of an animation, the first frame is taken; of 16
    bits a channel, the upper 8, so that 12 bits in 16 are nearly black; transparent pixels keep their colour, which
    is black in many files.

    Raises:
        ImageError: It is none of these, damaged, or far longer than wide.
    """
    if image is None or (isinstance(image, bytes) and not image):
        raise ImageError("there is no image: the file is empty or cannot be read")
    try:
        with _unwarned():
            decoded = _opened(image)
            if 0 in decoded.size:
                raise ImageError("the image has no pixels")
            if max(decoded.size) > MAX_ASPECT * min(decoded.size):
                width, height = decoded.size
                raise ImageError(
                    f"the image is {width} x {height} pixels, more than {MAX_ASPECT} times as long as wide"
                )
            upright = ImageOps.exif_transpose(decoded) if isinstance(image, bytes) else decoded
            return _eight_bits(upright).convert("RGB")
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError("the image cannot be decoded: its format is unknown") from error
    except Exception as error:  # damaged images raise errors of many types
        raise ImageError(f"the image cannot be decoded: {one_line(error)}") from error


def _opened(image: Any) -> Image.Image:
    if isinstance(image, bytes):
        return Image.open(io.BytesIO(image), formats=FORMATS)
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (3,)) or pixels.ndim < 2:
        raise ImageError(f"expected an image as uint8 (H, W, 3), got an array of {pixels.dtype}, shape {pixels.shape}")
    return Image.fromarray(pixels)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return an image whose channels have 8 bits: Pillow's own conversion cuts off all that is above 255."""
    # Older Pillows read a PNG of 16 bits as 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ImageError(f"pixels of mode {image.mode} are not supported; give 8 or 16 bits per channel")
    return image


_quiet = threading.Lock()
_n_quiet = 0
_filters = ExitStack()


@contextmanager
def _unwarned() -> Iterator[None]:
    """Suppress warnings in a block that several threads may be in.

    Pillow warns about images that it reads all the same: odd metadata, sizes near its limit. Filters belong to the
    process, so the first thread to enter changes them and the last one to leave restores them.
    """
    global _n_quiet
    with _quiet:
        if _n_quiet == 0:
            _filters.enter_context(warnings.catch_warnings(action="ignore"))
        _n_quiet += 1
    try:
        yield
    finally:
        with _quiet:
            _n_quiet -= 1
            if _n_quiet == 0:
                _filters.close()
