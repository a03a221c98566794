"""Videos from files, folders, lists and arrays: which frames are taken, and when they are shown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from dlm_decode.errors import InvalidInputError, MediaError
from dlm_decode.media import IMAGE_SUFFIXES, open_image

__all__ = ["Clip", "FrameSampling", "open_video"]


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a video the model is shown.

    With a rate, every n-th frame is taken, n being the video's own rate over `fps`, rounded to a
    whole number (halves to the even one) and at least 1. More than `max_frames` are replaced by
    `max_frames` at even distances from the first to the last, rounded down.

    Args:
        max_frames: upper limit.
        fps: frames per second to take; at or above the video's own rate, and with `None`, that is
            every frame.
        force_sample: always take `max_frames` at even distances; a shorter video repeats frames.
        frame_rate: frames per second of folders, lists and arrays, which do not say it themselves;
            `None` leaves their frames without times, and `fps` unused.
        has_drifting_times: give a frame's time as its number over n, as VidLaDA's program does
            when it goes by `fps`; it is off for rates that are no multiple of `fps`.

    Raises:
        InvalidInputError: `max_frames` below 1, or a rate that is not above 0 and finite.

    Source: VidLaDA's published evaluation; LLaVA-Video's takes frames likewise.
    """

    max_frames: int = 32
    fps: float | None = None
    force_sample: bool = False
    frame_rate: float | None = None
    has_drifting_times: bool = False

    def __post_init__(self) -> None:
        count = self.max_frames
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidInputError(
                f"max_frames must be a whole number of at least 1, got {count!r}."
            )
        for name in ("fps", "frame_rate"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                hint = "; a large number takes every frame" if name == "fps" else ""
                raise InvalidInputError(
                    f"{name} must be a finite number above 0 (frames per second){hint}; "
                    f"got {value!r}."
                )
        if not isinstance(self.force_sample, bool):
            raise InvalidInputError(
                f"force_sample must be True or False, got {self.force_sample!r}."
            )

    def pick(self, total: int, rate: float | None) -> tuple[list[int], list[float] | None]:
        """Numbers of the frames to take, and their times.

        Args:
            total: frames of the video, at least 1.
            rate: frames per second, `None` if unknown.

        Returns:
            Frame numbers from 0, and seconds for each; `None` without a rate.
        """
        stride = 1
        if self.fps is not None and rate is not None:
            stride = max(1, round(rate / self.fps))
        indices = list(range(0, total, stride))
        per_second = stride if self.has_drifting_times and self.fps is not None else rate
        if len(indices) > self.max_frames or self.force_sample:
            indices = np.linspace(0, total - 1, self.max_frames, dtype=int).tolist()
            per_second = rate
        if rate is None or per_second is None:
            return indices, None
        return indices, [index / per_second for index in indices]


@dataclass(frozen=True)
class Clip:
    """The frames that were taken of one video.

    Attributes:
        name: the file or folder, or what else the video was given as.
        frames: RGB pictures in time order.
        indices: number of each frame in the video, from 0.
        total: frames of the whole video.
        rate: the video's frames per second; `None` if unknown.
        times: seconds at which each frame is shown; `None` without a rate.
    """

    name: str
    frames: list[Image.Image]
    indices: list[int]
    total: int
    rate: float | None = None
    times: list[float] | None = None

    def time_instruction(self) -> str:
        """What the model is told about the frames' times.

        Raises:
            MediaError: a video without a frame rate.

        Source: VidLaDA's published evaluation, whose wording the model knows.
        """
        if self.times is None or self.rate is None:
            raise MediaError(
                f"{self.name} has no frame rate, so its frames have no times; pass frame_rate=, "
                "or time_instruction=False."
            )
        times = ",".join(f"{time:.2f}s" for time in self.times)
        return (
            f"The video lasts for {self.total / self.rate:.2f} seconds, and {len(self.frames)} "
            f"frames are uniformly sampled from it. These frames are located at {times}. "
            "Please answer the following questions related to this video."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pictures, for records."""
        return {
            "name": self.name,
            "total_frames": self.total,
            "rate": self.rate,
            "indices": self.indices,
            "times": self.times,
        }


class _Source(Protocol):
    """A video before frames are taken."""

    name: str
    total: int
    rate: float | None

    def read(self, indices: Sequence[int]) -> list[Image.Image] | None:
        """The frames; `None` if there turned out to be fewer, and `total` now says how many."""
        ...


def open_video(
    source: Any, sampling: FrameSampling | None = None, *, is_timed: bool = False
) -> Clip:
    """Frames of a video, RGB, in time order.

    Args:
        source: a video file (needs PyAV), a folder of image files in name order (`frame2` comes
            before `frame10`), a list of images as `open_image` takes them, or an array
            `(F, H, W, 3)`.
        sampling: which frames; those of `FrameSampling()` by default.
        is_timed: refuse a video whose frame rate is unknown, because `fps` would not be kept.

    Returns:
        Clip.

    Raises:
        MediaError: nothing to read, or unreadable; the message names the video and the reason.
        InvalidInputError: `is_timed`, and no frame rate.
    """
    sampling = sampling or FrameSampling()
    video = _source_of(source, sampling.frame_rate)
    if is_timed and video.rate is None:
        raise InvalidInputError(
            f"fps={sampling.fps!r} needs to know how fast {video.name} runs; pass frame_rate=, or "
            "leave fps out to take frames at even distances."
        )
    frames = None
    while frames is None:
        if not video.total:
            raise MediaError(f"{video.name} has no frames; pass a video with at least one.")
        indices, times = sampling.pick(video.total, video.rate)
        frames = video.read(indices)
    return Clip(video.name, frames, indices, video.total, video.rate, times)


def _source_of(source: Any, frame_rate: float | None) -> _Source:
    if isinstance(source, np.ndarray):
        if source.ndim != 4 or source.shape[0] == 0:
            raise MediaError(
                f"a video array must be (F, H, W, 3) with at least one frame, got {source.shape}."
            )
        return _Pictures(f"the video array of shape {source.shape}", source, frame_rate)
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        if not source:
            raise MediaError("a video given as a list has no frames; give at least one image.")
        return _Pictures(f"the list of {len(source)} frames", source, frame_rate)
    if not isinstance(source, (str, Path)):
        raise MediaError(
            "a video must be a path to a file or a folder, a list of images or an array, got "
            f"{type(source).__name__}."
        )
    path = Path(source)
    if path.is_dir():
        return _Pictures(f"the folder {str(path)!r}", _frame_files(path), frame_rate)
    if not path.exists():
        raise MediaError(f"no video at {str(path)!r}.")
    return _File(path)


def _frame_files(folder: Path) -> list[Path]:
    """The image files of a folder in name order, numbers in names by their value."""
    files = [file for file in folder.iterdir() if not file.name.startswith(".")]
    allowed = ", ".join(sorted(IMAGE_SUFFIXES))
    if not files:
        raise MediaError(
            f"the folder {str(folder)!r} holds no image files to use as frames ({allowed})."
        )
    for file in files:
        if file.suffix.lower() not in IMAGE_SUFFIXES or file.is_dir():
            raise MediaError(
                f"the folder {str(folder)!r} holds {file.name!r}, which is no image ({allowed}); "
                "remove it, or pass the frames as a list."
            )
    return sorted(files, key=lambda file: (_by_number(file.name), file.name))


def _by_number(name: str) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]


class _Pictures:
    """Frames that are pictures already, or files of them."""

    def __init__(self, name: str, pictures: Any, rate: float | None) -> None:
        self.name, self._pictures, self.rate = name, pictures, rate
        self.total = len(pictures)

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        opened = {}
        for index in sorted(set(indices)):
            try:
                opened[index] = open_image(self._pictures[index])
            except MediaError as error:
                raise MediaError(f"frame {index} of {self.name}: {error}") from error
        return [opened[index] for index in indices]


class _File:
    """A video file, read with PyAV."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, f"the video {str(path)!r}"
        try:
            import av
        except ImportError:
            raise MediaError(
                f"reading the video file {str(path)!r} needs PyAV; install dlm-decode[video], or "
                "pass a folder of frames."
            ) from None
        self._av = av
        # Packets are counted: containers give wrong frame counts or none.
        with _opened(self._av, self._path) as (container, stream):
            rate = stream.average_rate
            self.rate: float | None = float(rate) if rate else None
            self.total = sum(1 for packet in container.demux(stream) if packet.size)

    def read(self, indices: Sequence[int]) -> list[Image.Image] | None:
        wanted, found, count = set(indices), {}, 0
        with _opened(self._av, self._path) as (container, stream):
            stream.thread_type = "AUTO"
            for frame in container.decode(stream):
                if count in wanted:
                    found[count] = _upright(frame)
                count += 1
                if len(found) == len(wanted):
                    return [found[index] for index in indices]
        self.total = count
        return None


@contextmanager
def _opened(av: Any, path: Path) -> Iterator[tuple[Any, Any]]:
    """A container and its video stream; what PyAV refuses, there and inside, is a `MediaError`."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                kinds = ", ".join(sorted({stream.type for stream in container.streams}))
                raise MediaError(
                    f"the video {str(path)!r} has no video stream (it holds {kinds or 'nothing'}): "
                    "it has no pictures, or is cut off; pass another file."
                )
            yield container, container.streams.video[0]
    except (av.FFmpegError, OSError) as error:
        raise MediaError(
            f"cannot decode the video {str(path)!r} with PyAV: {error}. It may be cut off, or no "
            "video; convert it, or pass a folder of frames."
        ) from error


def _upright(frame: Any) -> Image.Image:
    """The frame as an RGB picture, turned as its file says."""
    image = frame.to_image().convert("RGB")
    rotation = getattr(frame, "rotation", 0)
    return image.rotate(rotation, expand=True) if rotation else image
