"""Generated pictures: coloured shapes and real handwritten digits in a 3 x 3 grid.

There are also pictures that are no scenes.

A scene is a function of `(split, seed)`. Its layout decides its split (by a hash), so training and
held-out scenes differ by construction, and the digits are split before they are placed.

The digits are the 1,797 of the UCI data set "Optical Recognition of Handwritten Digits" (E.
Alpaydin, C. Kaynak; CC BY 4.0), as scikit-learn distributes them, packed into `data/digits.npz`.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

import dlm_decode

__all__ = [
    "CELL_NAMES",
    "CELL_SIZE",
    "COLOURS",
    "DATA_VERSION",
    "IMAGE_SIZE",
    "OVERSAMPLING",
    "SHAPES",
    "Scene",
    "SceneObject",
    "Split",
    "draw_shape",
    "generate_scene",
]

DATA_VERSION = "scenes-1"
IMAGE_SIZE = 96
CELL_SIZE = 32
SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 90, 230),
    "yellow": (235, 210, 40),
    "purple": (150, 50, 190),
    "orange": (245, 135, 25),
}
SIZES = {"small": 7, "large": 13}  # radius in pixels
CELL_NAMES = (
    "top left",
    "top center",
    "top right",
    "middle left",
    "center",
    "middle right",
    "bottom left",
    "bottom center",
    "bottom right",
)
Split = Literal["train", "heldout"]
_HELDOUT_SHARE = 10  # one layout in ten
OVERSAMPLING = 3


@dataclass(frozen=True)
class SceneObject:
    """One thing in a cell.

    Attributes:
        cell: 0 to 8, row-major.
        name: a shape, or a digit as `"0"` to `"9"`.
        colour: key of `COLOURS`.
        size: `"small"` or `"large"`; digits have one size, and `""` here.
    """

    cell: int
    name: str
    colour: str
    size: str = ""

    @property
    def is_digit(self) -> bool:
        """Whether this is a handwritten digit."""
        return self.name.isdigit()

    @property
    def place(self) -> str:
        """Name of the cell."""
        return CELL_NAMES[self.cell]


@dataclass(frozen=True)
class Scene:
    """A picture and what is in it.

    Attributes:
        split: `"train"` or `"heldout"`.
        seed: number of the scene in its split.
        objects: in reading order; empty for a picture that is no scene.
        is_photo: a picture that is no scene.
        boxes: `(left, top, right, bottom)` of each object in pixels.
        image: RGB, 96 x 96.
    """

    split: Split
    seed: int
    objects: tuple[SceneObject, ...]
    is_photo: bool
    boxes: tuple[tuple[float, float, float, float], ...]
    image: Image.Image = field(repr=False, compare=False)


@cache
def _digits() -> dict[tuple[Split, int], np.ndarray]:
    """8 x 8 digits by split and label; every fifth one is held out."""
    path = Path(dlm_decode.__file__).parent / "data" / "digits.npz"
    with np.load(path) as packed:
        images, labels = packed["images"], packed["labels"]
    is_heldout = np.arange(len(labels)) % 5 == 0
    return {
        (split, label): images[(labels == label) & (is_heldout == (split == "heldout"))]
        for split in ("train", "heldout")
        for label in range(10)
    }


def split_of(objects: tuple[SceneObject, ...]) -> Split:
    """The split that a layout belongs to."""
    text = ";".join(f"{o.cell}{o.name}{o.colour}{o.size}" for o in objects)
    return "heldout" if zlib.crc32(text.encode()) % _HELDOUT_SHARE == 0 else "train"


def generate_scene(
    seed: int, split: Split = "train", *, photo_share: float = 0.06, is_dense: bool = False
) -> Scene:
    """Scene number `seed` of a split.

    Args:
        seed: any whole number of at least 0.
        split: which scenes to draw from.
        photo_share: share of pictures that are no scenes.
        is_dense: something in every cell, mostly digits; no questions are asked about these, the
            tower learns from them.
    """
    rng = random.Random(f"{DATA_VERSION}/{split}/{seed}{'/dense' if is_dense else ''}")
    if rng.random() < photo_share:
        return Scene(split, seed, (), True, (), _texture(rng))
    while True:
        objects = _layout(rng, is_dense)
        if split_of(objects) == split:
            break
    image, boxes = _render(objects, split, rng)
    return Scene(split, seed, objects, False, boxes, image)


def _layout(rng: random.Random, is_dense: bool = False) -> tuple[SceneObject, ...]:
    objects = []
    for cell in sorted(rng.sample(range(9), 9 if is_dense else rng.choice((2, 3, 3, 4, 4, 5)))):
        colour = rng.choice(list(COLOURS))
        if rng.random() < (0.65 if is_dense else 0.4):
            objects.append(SceneObject(cell, str(rng.randrange(10)), colour))
        else:
            objects.append(SceneObject(cell, rng.choice(SHAPES), colour, rng.choice(list(SIZES))))
    return tuple(objects)


def _render(
    objects: tuple[SceneObject, ...], split: Split, rng: random.Random
) -> tuple[Image.Image, tuple[tuple[float, float, float, float], ...]]:
    scale = OVERSAMPLING
    level = rng.randrange(225, 256) if rng.random() < 0.7 else rng.randrange(20, 60)
    background = tuple(max(0, min(255, level + rng.randrange(-8, 9))) for _ in range(3))
    canvas = Image.new("RGB", (IMAGE_SIZE * scale, IMAGE_SIZE * scale), background)
    boxes = []
    for item in objects:
        radius = 12.0 if item.is_digit else SIZES[item.size] * rng.uniform(0.92, 1.08)
        slack = CELL_SIZE / 2 - radius - 1
        x = (item.cell % 3 + 0.5) * CELL_SIZE + rng.uniform(-slack, slack)
        y = (item.cell // 3 + 0.5) * CELL_SIZE + rng.uniform(-slack, slack)
        boxes.append((x - radius, y - radius, x + radius, y + radius))
        colour = tuple(
            max(0, min(255, part + rng.randrange(-14, 15))) for part in COLOURS[item.colour]
        )
        if item.is_digit:
            choices = _digits()[split, int(item.name)]
            _paste_digit(
                canvas,
                choices[rng.randrange(len(choices))],
                (x, y),
                radius,
                colour,
                rng.uniform(-8, 8),
            )
        else:
            draw_shape(canvas, item.name, (x, y), radius, colour)
    return canvas.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX), tuple(boxes)


def _paste_digit(
    canvas: Image.Image,
    pixels: np.ndarray,
    centre: tuple[float, float],
    radius: float,
    colour: tuple[int, ...],
    angle: float,
) -> None:
    size = round(2 * radius * OVERSAMPLING)
    ink = Image.fromarray((pixels * 15).clip(0, 255).astype(np.uint8))
    ink = ink.resize((size, size), Image.Resampling.BICUBIC).rotate(
        angle, Image.Resampling.BILINEAR
    )
    left, top = (round(part * OVERSAMPLING - size / 2) for part in centre)
    canvas.paste(Image.new("RGB", (size, size), colour), (left, top), ink)


def draw_shape(
    canvas: Image.Image,
    name: str,
    centre: tuple[float, float],
    radius: float,
    colour: tuple[int, ...],
) -> None:
    """Draws one of `SHAPES`; `centre` and `radius` are in pixels of the finished picture.

    Args:
        canvas: `OVERSAMPLING` times as large as the finished picture.
        name: of the shape.
        centre: `(x, y)`.
        radius: half its extent, roughly.
        colour: RGB.
    """
    draw = ImageDraw.Draw(canvas)
    x, y, r = centre[0] * OVERSAMPLING, centre[1] * OVERSAMPLING, radius * OVERSAMPLING
    if name == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif name == "square":
        half = r * 0.88
        draw.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif name == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r * 0.8), (x + r, y + r * 0.8)], fill=colour)
    elif name == "star":
        angles = np.pi * (np.arange(10) / 5 - 0.5)
        reach = np.where(np.arange(10) % 2 == 0, r * 1.08, r * 0.45)
        draw.polygon(
            [(x + k * np.cos(a), y + k * np.sin(a)) for a, k in zip(angles, reach, strict=True)],
            fill=colour,
        )
    else:
        bar = r * 0.34
        draw.rectangle((x - bar, y - r, x + bar, y + r), fill=colour)
        draw.rectangle((x - r, y - bar, x + r, y + bar), fill=colour)


def _texture(rng: random.Random) -> Image.Image:
    """Soft colour noise of several scales, with edges.

    It is something like a photograph and nothing like a scene.
    """
    numbers = np.random.default_rng(rng.getrandbits(64))
    total = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.float32)
    is_grey = numbers.random() < 0.2
    for cells in (2, 4, 8, 16, 48):
        noise = numbers.random((cells, cells, 3)).astype(np.float32)
        if is_grey:
            noise[:] = noise.mean(axis=2, keepdims=True)
        layer = Image.fromarray((noise * 255).astype(np.uint8)).resize(
            (IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC
        )
        total += np.asarray(layer, dtype=np.float32) * numbers.uniform(0.2, 1.0) / np.sqrt(cells)
    total = (total - total.min()) / max(float(np.ptp(total)), 1e-6) * numbers.uniform(120, 255)
    image = Image.fromarray(total.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randrange(0, 7)):
        corners = [
            (rng.randrange(-20, 116), rng.randrange(-20, 116)) for _ in range(rng.choice((3, 4, 5)))
        ]
        draw.polygon(corners, fill=tuple(rng.randrange(256) for _ in range(3)))
    return image
