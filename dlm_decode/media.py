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


def uniform_indices(total: int, count: int) -> list[int]:
    """`count` of `total` frame numbers, evenly spaced from first to last; all if fewer exist."""
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
        from av.error import FFmpegError
    except ImportError:
        raise MediaError(
            f"reading the video file {str(path)!r} needs PyAV; install dlm-decode[video], or pass "
            "a folder of frames."
        ) from None
    try:
        # Counted first: containers give wrong frame counts or none, and all frames as pictures may
        # not fit in memory.
        with av.open(str(path)) as container:
            total = sum(1 for _ in container.decode(video=0))
        wanted = set(uniform_indices(total, num_frames))
        with av.open(str(path)) as container:
            frames = [
                frame.to_image()
                for index, frame in enumerate(container.decode(video=0))
                if index in wanted
            ]
    except (FFmpegError, IndexError, OSError) as error:
        raise MediaError(f"cannot decode video {str(path)!r} with PyAV: {error}.") from error
    if not frames:
        raise MediaError(f"the video {str(path)!r} has no frames.")
    return [_to_rgb(frame) for frame in frames]
