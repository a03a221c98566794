"""Generated clips: coloured shapes that move over a plain background, appear and vanish.

A clip is a function of `(split, seed)`. What happens in it decides its split (by a hash), so that
training and held-out clips differ by construction.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field

from PIL import Image

from dlm_decode.eval.scenes import (
    COLOURS,
    IMAGE_SIZE,
    OVERSAMPLING,
    SHAPES,
    Split,
    draw_shape,
)

__all__ = [
    "DATA_VERSION",
    "FRAMES_PER_STEP",
    "MAX_OBJECTS",
    "MOTIONS",
    "NUM_FRAMES",
    "NUM_STEPS",
    "Clip",
    "ClipObject",
    "generate_clip",
]

DATA_VERSION = "clips-1"
NUM_STEPS = 8
FRAMES_PER_STEP = 2
NUM_FRAMES = NUM_STEPS * FRAMES_PER_STEP
MAX_OBJECTS = 4
MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "nowhere": (0, 0)}
_HELDOUT_SHARE = 10  # one clip in ten
_MIN_SEEN = 4  # steps for which every object is there
_RADII = (10.5, 13.0)
_WAYS = (28.0, 46.0)  # pixels that a moving object covers in all
_TRIES = 60


@dataclass(frozen=True)
class ClipObject:
    """One thing in a clip.

    Attributes:
        name: a shape.
        colour: key of `COLOURS`; no two objects of a clip have the same.
        motion: key of `MOTIONS`.
        first: step in which it appears.
        stop: step from which on it is gone; `NUM_STEPS` if it stays to the end.
        path: its centre `(x, y)` in pixels, for each step from `first` on.
        radius: in pixels.
    """

    name: str
    colour: str
    motion: str
    first: int
    stop: int
    path: tuple[tuple[float, float], ...] = field(repr=False)
    radius: float = field(repr=False)

    def at(self, step: int) -> tuple[float, float] | None:
        """Where its centre is in a step; `None` if it is not there."""
        return self.path[step - self.first] if self.first <= step < self.stop else None


@dataclass(frozen=True)
class Clip:
    """What happens in a clip; its pictures are drawn when they are asked for.

    Attributes:
        split: `"train"` or `"heldout"`.
        seed: number of the clip in its split.
        objects: one to four.
        background: RGB.
        shades: RGB of each object.
    """

    split: Split
    seed: int
    objects: tuple[ClipObject, ...]
    background: tuple[int, ...]
    shades: tuple[tuple[int, ...], ...]

    def steps(self) -> list[Image.Image]:
        """The different pictures of the clip, RGB, 96 x 96, in time order."""
        return [self._drawn(step) for step in range(NUM_STEPS)]

    def frames(self) -> list[Image.Image]:
        """All 16 frames; a step lasts two."""
        return [picture for picture in self.steps() for _ in range(FRAMES_PER_STEP)]

    def _drawn(self, step: int) -> Image.Image:
        size = IMAGE_SIZE * OVERSAMPLING
        canvas = Image.new("RGB", (size, size), self.background)
        for item, shade in zip(self.objects, self.shades, strict=True):
            centre = item.at(step)
            if centre is not None:
                draw_shape(canvas, item.name, centre, item.radius, shade)
        return canvas.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)


def split_of(objects: tuple[ClipObject, ...]) -> Split:
    """The split that a course of events belongs to, wherever in the picture it happens."""
    text = ";".join(sorted(f"{o.colour} {o.name} {o.motion} {o.first} {o.stop}" for o in objects))
    return "heldout" if zlib.crc32(text.encode()) % _HELDOUT_SHARE == 0 else "train"


def generate_clip(seed: int, split: Split = "train") -> Clip:
    """Clip number `seed` (at least 0) of a split."""
    rng = random.Random(f"{DATA_VERSION}/{split}/{seed}")
    count = 1 + seed % MAX_OBJECTS
    while True:
        objects = _objects(rng, count)
        if objects is not None and split_of(objects) == split:
            break
    level = rng.randrange(225, 256) if rng.random() < 0.7 else rng.randrange(20, 60)
    shades = tuple(_varied(rng, COLOURS[item.colour], 14) for item in objects)
    return Clip(split, seed, objects, _varied(rng, (level,) * 3, 8), shades)


def _varied(rng: random.Random, colour: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple(max(0, min(255, part + rng.randrange(-by, by + 1))) for part in colour)


def _objects(rng: random.Random, count: int) -> tuple[ClipObject, ...] | None:
    """Objects that never touch, or `None` if there is no room for what was drawn."""
    latest = NUM_STEPS - _MIN_SEEN
    # Often everything appears at a time of its own, so that there is a first and a last.
    is_ordered = rng.random() < 0.75
    starts = (
        rng.sample(range(latest + 1), count)
        if is_ordered
        else [rng.choice((0, 0, rng.randint(0, latest))) for _ in range(count)]
    )
    objects: list[ClipObject] = []
    for first, colour in zip(starts, rng.sample(list(COLOURS), count), strict=True):
        for _ in range(_TRIES):
            item = _object(rng, first, colour)
            if not any(_touch(item, other) for other in objects):
                objects.append(item)
                break
        else:
            return None
    return tuple(objects)


def _object(rng: random.Random, first: int, colour: str) -> ClipObject:
    stop = NUM_STEPS
    if rng.random() < 0.3:
        stop = rng.randint(first + _MIN_SEEN, NUM_STEPS)
    motion = rng.choice(list(MOTIONS))
    radius = rng.uniform(*_RADII)
    way = rng.uniform(*_WAYS)
    moves = [direction * way for direction in MOTIONS[motion]]
    edge = radius + 1
    begin = [
        rng.uniform(edge + max(0.0, -move), IMAGE_SIZE - edge - max(0.0, move)) for move in moves
    ]
    num_seen = stop - first
    path = tuple(
        (begin[0] + moves[0] * share, begin[1] + moves[1] * share)
        for share in (step / (num_seen - 1) for step in range(num_seen))
    )
    return ClipObject(rng.choice(SHAPES), colour, motion, first, stop, path, radius)


def _touch(one: ClipObject, other: ClipObject) -> bool:
    """Whether two objects come closer than a pixel or two in some step."""
    gap = one.radius + other.radius + 2
    for step in range(NUM_STEPS):
        a, b = one.at(step), other.at(step)
        if a is not None and b is not None and max(abs(a[0] - b[0]), abs(a[1] - b[1])) < gap:
            return True
    return False
