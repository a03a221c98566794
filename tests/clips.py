"""Small generated videos."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (48, 64)


def frames_of(count: int, seed: int = 0) -> list[np.ndarray]:
    """`count` grey frames `(48, 64, 3)` that grow brighter, with a coloured corner."""
    colour = np.random.default_rng(seed).integers(0, 256, 3)
    frames = []
    for number in range(count):
        frame = np.full((*SIZE, 3), 20 + 200 * number // max(1, count - 1), dtype=np.uint8)
        frame[:12, :12] = colour
        frames.append(frame)
    return frames


def write_clip(path: Path, count: int = 6, seed: int = 0) -> Path:
    """An mp4 file, through PyAV."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.height, stream.width = SIZE
        stream.pix_fmt = "yuv420p"
        for frame in frames_of(count, seed):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def write_frames(folder: Path, count: int = 6, seed: int = 0) -> Path:
    """A folder of PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(frames_of(count, seed)):
        Image.fromarray(frame).save(folder / f"{number:03d}.png")
    return folder
