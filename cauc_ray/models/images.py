"""Images from encoded bytes or pixels, as Pillow reads them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
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
    batch: Batch, read: Callable[[Any], Any], apply: Callable[..., Iterable[Any]] = map
) -> tuple[dict[int, Any], dict[int, str]]:
    """Return what a batch's images are read as, by row, and why the other rows cannot be.

    Args:
        batch: Columns, with one named `image`.
        read: Reads an image, by decode_image.
        apply: The map that reads them.

    Raises:
        DataError: The column `image` is missing.
    """
    require_columns(batch, "image")

    def read_or_fail(image: Any) -> Any:
        try:
            return read(image)
        except ImageError as error:
            return Unusable(error)

    return parted(dict(enumerate(apply(read_or_fail, batch["image"]))))


def centre_square(image: Any, size: int, shorter: int, resample: str) -> npt.NDArray[np.uint8]:
    """Return the centre of an image as uint8 (size, size, 3), as TorchVision's preprocessing resizes and cuts it.

    Args:
        image: An image as decode_image reads it.
        size: Side of the square.
        shorter: Shorter side of the image before it is cut, at least size.
        resample: Filter of the resizing, bilinear or bicubic.

    Raises:
        ImageError: As decode_image.
    """
    decoded = decode_image(image)
    width, height = (shorter * side // min(decoded.size) for side in decoded.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    resized = decoded.resize((width, height), Image.Resampling[resample.upper()])
    return np.array(resized.crop((left, top, left + size, top + size)))


def data_uri(image: Any) -> str:
    """Return an image as a data URI: its own bytes if every server reads them as decode_image does, else a PNG."""
    pixels = decode_image(image)
    if isinstance(image, bytes):
        with _opened(image) as header:
            is_plain = header.format in ("JPEG", "PNG") and header.mode in ("RGB", "L")
            if is_plain and "transparency" not in header.info and header.getexif().get(ORIENTATION, 1) == 1:
                return f"data:image/{str(header.format).lower()};base64,{base64.b64encode(image).decode()}"
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def decode_image(image: Any) -> Image.Image:
    """Return an image in RGB, upright, from encoded bytes, or from uint8 (H, W, 3) or (H, W).

    An image is turned as its EXIF orientation says, as people see it. Of an animation, the first frame is taken; of 16
    bits a channel, the upper 8, so that 12 bits in 16 are nearly black; transparent pixels keep their colour, which
    is black in many files.

    Raises:
        ImageError: It is none of these, damaged, or far longer than wide.
    """
    if image is None or (isinstance(image, bytes) and not image):
        raise ImageError("missing image: the file is empty or cannot be read")
    try:
        decoded = _opened(image)
        if 0 in decoded.size:
            raise ImageError("the image has no pixels")
        if max(decoded.size) > MAX_ASPECT * min(decoded.size):
            size = " x ".join(map(str, decoded.size))
            raise ImageError(f"the image is {size} pixels, more than {MAX_ASPECT} times as long as wide")
        return _eight_bits(ImageOps.exif_transpose(decoded)).convert("RGB")
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
    # From palettes with transparency, Pillow warns of a conversion straight to RGB.
    return image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image
