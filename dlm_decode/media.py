"""Images from files, arrays and PIL, in one form: RGB pictures the right way up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dlm_decode.errors import MediaError

__all__ = ["IMAGE_SUFFIXES", "open_image"]

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}


def open_image(source: Any) -> Image.Image:
    """An RGB image with EXIF rotation applied; transparent parts become white.

    Args:
        source: a path, a PIL image, or an array `(H, W)`, `(H, W, 3)` or `(H, W, 4)` of uint8 or of
            floats in [0, 1].

    Raises:
        MediaError: a missing, truncated or unreadable file, or an array of another form; the
            message names it.
    """
    if isinstance(source, Image.Image):
        image, name = source, "the given PIL image"
    elif isinstance(source, (str, Path)):
        image, name = _open_file(Path(source)), str(source)
    elif isinstance(source, np.ndarray):
        image, name = _from_array(source), f"array of shape {source.shape}"
    else:
        raise MediaError(
            f"an image must be a path, a PIL image or a numpy array, got {type(source).__name__}."
        )
    try:
        return _to_rgb(ImageOps.exif_transpose(image))
    except (OSError, ValueError, SyntaxError) as error:
        raise MediaError(f"cannot decode {name}: {error}.") from error


def _open_file(path: Path) -> Image.Image:
    if not path.exists():
        raise MediaError(f"no image at {str(path)!r}.")
    if path.is_dir():
        raise MediaError(
            f"{str(path)!r} is a folder; pass an image file, or the folder as a video."
        )
    try:
        image = Image.open(path)
        image.load()
    except UnidentifiedImageError:
        raise MediaError(f"{str(path)!r} is not an image that PIL can read.") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaError(f"cannot read image {str(path)!r}: {error}.") from error
    return image


def _from_array(array: np.ndarray) -> Image.Image:
    if (
        array.ndim not in (2, 3)
        or (array.ndim == 3 and array.shape[2] not in (3, 4))
        or 0 in array.shape
    ):
        raise MediaError(
            "an image array must be (H, W), (H, W, 3) or (H, W, 4) and not empty, got "
            f"{array.shape}."
        )
    if array.dtype == np.uint8:
        return Image.fromarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise MediaError(f"an image array must be uint8, or floats in [0, 1]; got {array.dtype}.")
    if not (array.min() >= 0 and array.max() <= 1):  # also false for NaN
        got = f"[{array.min():g}, {array.max():g}]"
        raise MediaError(f"a float image array must lie in [0, 1], got {got}.")
    return Image.fromarray((array * 255).round().astype(np.uint8))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_to_bytes(np.asarray(image), image.mode)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def _to_bytes(values: np.ndarray, mode: str) -> np.ndarray:
    """Wide grey values as uint8.

    16-bit files are scaled from their full range, others from the smallest fitting one.
    """
    values = np.nan_to_num(values.astype(np.float64))
    top = 65535.0
    if not mode.startswith("I;16"):
        limits = (1.0, 255.0, 65535.0) if mode == "F" else (255.0, 65535.0)
        top = next((limit for limit in limits if values.max() <= limit), 65535.0)
    return (values.clip(0, top) * (255 / top)).round().astype(np.uint8)
