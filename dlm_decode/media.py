"""Images and videos from files, arrays and PIL, in one form: RGB pictures the right way up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dlm_decode.errors import MediaError

__all__ = ["open_frames", "open_image", "uniform_indices"]

_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
DEFAULT_NUM_FRAMES = 32
_MAX_ASPECT = 200


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
            f"an image array must be (H, W), (H, W, 3) or (H, W, 4) and not empty, got {array.shape}."
        )
    if array.dtype == np.uint8:
        return Image.fromarray(array)
    if (
        not np.issubdtype(array.dtype, np.floating)
        or not np.isfinite(array).all()
        or array.min() < 0
        or array.max() > 1
    ):
        raise MediaError(f"an image array must be uint8, or floats in [0, 1]; got {array.dtype}.")
    return Image.fromarray((array * 255).round().astype(np.uint8))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, dtype=np.float64)
        top = max(float(values.max()), 1.0)
        top = 65535.0 if top > 255 else 255.0
        return Image.fromarray(
            (values.clip(0, top) * (255 / top)).round().astype(np.uint8)
        ).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def check_aspect(image: Image.Image) -> None:
    """Raises `MediaError` for an image so thin that a side would vanish when it is fitted to a
    grid.
    """
    long, short = max(image.size), min(image.size)
    if long > _MAX_ASPECT * short:
        raise MediaError(
            f"an image of {image.width} x {image.height} is too thin to be fitted to a grid of tiles (limit "
            f"{_MAX_ASPECT}:1); crop it, or use image_aspect_ratio='pad'."
        )


def uniform_indices(total: int, count: int) -> list[int]:
    """`count` frame numbers at even distances from the first to the last of `total`; all of them if
    there are fewer.
    """
    if total <= count:
        return list(range(total))
    return np.linspace(0, total - 1, count, dtype=int).tolist()


def open_frames(source: Any, num_frames: int = DEFAULT_NUM_FRAMES) -> list[Image.Image]:
    """Frames of a video, RGB, at most `num_frames` at even distances.

    Args:
        source: a video file (needs PyAV), a folder of image files in name order, a list of images,
            or an array `(F, H, W, 3)`.
        num_frames: upper limit; a list or an array is taken whole.

    Raises:
        MediaError: nothing to read, or unreadable; the message names the source and the reason.
    """
    if isinstance(source, np.ndarray):
        if source.ndim != 4 or source.shape[0] == 0:
            raise MediaError(
                f"a video array must be (F, H, W, 3) with at least one frame, got {source.shape}."
            )
        return [open_image(frame) for frame in source]
    if isinstance(source, Sequence) and not isinstance(source, str):
        if not source:
            raise MediaError("a video given as a list has no frames.")
        return [open_image(frame) for frame in source]
    if not isinstance(source, (str, Path)):
        raise MediaError(
            f"a video must be a path, a list of images or an array, got {type(source).__name__}."
        )
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _IMAGE_SUFFIXES)
        if not files:
            raise MediaError(f"the folder {str(path)!r} holds no image files to use as frames.")
        return [open_image(files[index]) for index in uniform_indices(len(files), num_frames)]
    if not path.exists():
        raise MediaError(f"no video at {str(path)!r}.")
    return _decode_video(path, num_frames)


def _decode_video(path: Path, num_frames: int) -> list[Image.Image]:
    try:
        import av
    except ImportError:
        raise MediaError(
            f"reading the video file {str(path)!r} needs PyAV; install dlm-decode[video], or pass a folder of frames."
        ) from None
    try:
        with av.open(str(path)) as container:
            frames = [frame.to_image() for frame in container.decode(video=0)]
    except (av.error.FFmpegError, IndexError, OSError) as error:
        raise MediaError(f"cannot decode video {str(path)!r} with PyAV: {error}.") from error
    if not frames:
        raise MediaError(f"the video {str(path)!r} has no frames.")
    return [_to_rgb(frames[index]) for index in uniform_indices(len(frames), num_frames)]
