"""Pictures of what a vision stage keeps: patches over the image, energy and leaves for SpecFlow."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from dlm_decode.autoregressive import AutoregressiveVlm
from dlm_decode.canvas import Prompt, VisualSpan
from dlm_decode.errors import InvalidInputError
from dlm_decode.media import open_image
from dlm_decode.vision.base import AttentionStage, Stage, TowerNeed, tower_needs
from dlm_decode.vision.cache_stage import CacheStage
from dlm_decode.vision.inside import InsideStage
from dlm_decode.vision.picture import Picture
from dlm_decode.vision.specflow import SpecFlow

if TYPE_CHECKING:
    from dlm_decode.base_vlm import BaseVlm

__all__ = ["Panel", "panels_of", "save"]

_SIDE = 320
_GAP = 12
_KEPT, _MERGED, _LEAF = (255, 196, 0), (0, 200, 255), (255, 255, 255)
_DIM = (0, 0, 0, 170)


@dataclass(frozen=True)
class Panel:
    """One picture of one part of the image.

    Attributes:
        title: what it shows.
        image: RGB, `_SIDE` pixels along its longer side.
        shades: `(left, top, right, bottom)` in pixels, and RGBA, painted over it.
        frames: likewise, and RGB of an outline.
    """

    title: str
    image: Image.Image
    shades: tuple[tuple[tuple[float, float, float, float], tuple[int, int, int, int]], ...]
    frames: tuple[tuple[tuple[float, float, float, float], tuple[int, int, int]], ...]


@torch.no_grad()
def panels_of(vlm: BaseVlm, stage: Stage, image: Any) -> list[Panel]:
    """What a stage keeps of an image, one panel for each part; SpecFlow adds its energy and leaves.

    Kept patches are as they are and outlined, tokens that stand for several have another outline,
    the rest is dark.

    Args:
        vlm: with a processor.
        stage: acts before the language model.
        image: as `open_image` takes it.

    Raises:
        InvalidInputError: a stage that acts later, or a model without a processor.
        MediaError: an image that cannot be read.
    """
    if isinstance(stage, (AttentionStage, CacheStage, InsideStage)):
        raise InvalidInputError(
            f"stage {getattr(stage, 'name', type(stage).__name__)!r} acts while the language model "
            "runs; show draws stages that act before it, such as specflow."
        )
    if vlm.processor is None:
        raise InvalidInputError(f"{vlm.name!r} has no processor that could prepare an image.")
    picture = open_image(image)
    prompt, tiles = _given(vlm, stage, picture)
    if hasattr(stage, "positions"):
        stage = replace(stage, positions="original")  # type: ignore[type-var]
    out = stage.before_lm(prompt)
    (span,) = prompt.spans
    kept, merged = _where(prompt, out, span)
    panels = []
    for number, (start, rows, columns, has_newline) in enumerate(span.sections):
        # A stitched part shows the image itself; others are what the tower saw.
        is_tile = number == 0 or len(span.sections) == len(tiles)
        base = _resized(tiles[number] if is_tile else picture)
        boxes, shades, frames = _boxes(base, rows, columns), [], []
        for place, box in enumerate(boxes):
            at = start + place // columns * (columns + has_newline) + place % columns
            if at in kept:
                frames.append((box, _KEPT))
            elif at in merged:
                frames.append((box, _MERGED))
            else:
                shades.append((box, _DIM))
        count = rows * columns - len(shades)
        title = f"part {number + 1}: {count} of {rows * columns} patches"
        panels.append(Panel(title, base, tuple(shades), tuple(frames)))
        if isinstance(stage, SpecFlow):
            panels.append(_energy_panel(stage, Picture.of(prompt, span), number, base))
    return panels


def _given(vlm: BaseVlm, stage: Stage, picture: Image.Image) -> tuple[Prompt, list[Image.Image]]:
    """The prompt that the stage is given, and what the tower saw of the image, part by part."""
    if isinstance(vlm, AutoregressiveVlm):
        seen = _Seen(tuple(tower_needs([stage])))
        vlm.generate("?", images=[picture], stages=[seen], gen_length=1)
        return seen.prompts[0], [picture]
    inputs = vlm.processor("?", images=[picture])
    prompt = vlm.model.encode_prompt(
        inputs.input_ids.to(vlm.device),
        inputs.pixel_values,
        inputs.image_sizes,
        inputs.modalities,
        needs=tower_needs([stage]),
    )
    (pixels,) = inputs.pixel_values or ()
    return prompt, [_shown(tile) for tile in (pixels[None] if pixels.dim() == 3 else pixels)]


@dataclass(frozen=True)
class _Seen:
    """A stage that changes nothing and keeps what it was shown."""

    tower_needs: tuple[TowerNeed, ...]
    prompts: list[Prompt] = field(default_factory=list)

    def before_lm(self, prompt: Prompt) -> Prompt:
        self.prompts.append(prompt)
        return prompt


def _where(prompt: Prompt, out: Prompt, span: VisualSpan) -> tuple[set[int], set[int]]:
    """Places in the span that stay as they are, and those whose token has changed."""
    kept, merged = set(), set()
    visual = out.is_visual
    for position, token in zip(out.positions()[visual].tolist(), out.embeds[visual], strict=True):
        same = bool(torch.equal(prompt.embeds[position], token))
        (kept if same else merged).add(position - span.start)
    return kept, merged


def _energy_panel(stage: SpecFlow, picture: Picture, number: int, base: Image.Image) -> Panel:
    part = stage.maps(picture)[number]
    rows, columns = part.energy.shape[1:]
    values = (part.energy[0] / part.energy.max()).flatten().tolist()
    shades = [
        (box, (*_heat(value), 200))
        for box, value in zip(_boxes(base, rows, columns), values, strict=True)
    ]
    wide, high = base.width / columns, base.height / rows
    frames = [
        ((left * wide, top * high, right * wide, bottom * high), _LEAF)
        for _, (top, bottom), (left, right) in part.leaves
    ]
    title = f"part {number + 1}: energy, {len(part.leaves)} leaves"
    return Panel(title, base, tuple(shades), tuple(frames))


def _heat(value: float) -> tuple[int, int, int]:
    """Black over red and yellow to white."""
    return tuple(int(255 * min(max(3 * value - step, 0), 1)) for step in range(3))  # type: ignore[return-value]


def _shown(tile: Tensor) -> Image.Image:
    values = ((tile.float().cpu().permute(1, 2, 0) + 1) * 127.5).clamp(0, 255).round()
    return Image.fromarray(values.numpy().astype(np.uint8))


def _resized(image: Image.Image) -> Image.Image:
    scale = _SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size)


def _boxes(image: Image.Image, rows: int, columns: int) -> list[tuple[float, float, float, float]]:
    wide, high = image.width / columns, image.height / rows
    return [
        (column * wide, row * high, (column + 1) * wide, (row + 1) * high)
        for row in range(rows)
        for column in range(columns)
    ]


def save(panels: list[Panel], title: str, path: str | Path) -> Path:
    """Writes the panels as `.png`, `.svg` or `.html`; missing parent folders are made.

    Raises:
        InvalidInputError: another suffix.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".html"):
        raise InvalidInputError(f"{str(path)!r} must end in .png, .svg or .html.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        _as_image(panels, title).save(path)
        return path
    text = _as_svg(panels, title)
    if path.suffix == ".html":
        head = f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title>'
        text = f'{head}<body style="background:#12151c">{text}</body>\n'
    path.write_text(text, encoding="utf-8")
    return path


def _corners(panels: list[Panel]) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Where each panel's image begins, in rows of four, and the size of the whole."""
    across = min(4, len(panels))
    cell, line = _SIDE + _GAP, _SIDE + 2 * _GAP + 8
    corners = [
        (_GAP + place % across * cell, 48 + place // across * line) for place in range(len(panels))
    ]
    return corners, (_GAP + across * cell, 40 + math.ceil(len(panels) / across) * line)


def _as_image(panels: list[Panel], title: str) -> Image.Image:
    corners, size = _corners(panels)
    sheet = Image.new("RGB", size, (18, 21, 28))
    ImageDraw.Draw(sheet).text((_GAP, 8), title, fill="white")
    for panel, (left, top) in zip(panels, corners, strict=True):
        cover = Image.new("RGBA", panel.image.size)
        draw = ImageDraw.Draw(cover)
        for box, colour in panel.shades:
            draw.rectangle(box, fill=colour)
        for box, colour in panel.frames:
            draw.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), outline=colour)
        shown = Image.alpha_composite(panel.image.convert("RGBA"), cover)
        sheet.paste(shown.convert("RGB"), (left, top))
        ImageDraw.Draw(sheet).text((left, top - 16), panel.title, fill="white")
    return sheet


def _as_svg(panels: list[Panel], title: str) -> str:
    corners, (width, height) = _corners(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13" fill="#fff">',
        f'<rect width="{width}" height="{height}" fill="#12151c"/>',
        f'<text x="{_GAP}" y="20">{escape(title)}</text>',
    ]
    for panel, (left, top) in zip(panels, corners, strict=True):
        held = io.BytesIO()
        panel.image.save(held, format="PNG")
        data = base64.b64encode(held.getvalue()).decode()
        wide, high = panel.image.size
        parts += [
            f'<g transform="translate({left} {top})">',
            f'<text y="-6">{escape(panel.title)}</text>',
            f'<image width="{wide}" height="{high}" href="data:image/png;base64,{data}"/>',
        ]
        for box, (*colour, alpha) in panel.shades:
            parts.append(
                f'{_rectangle(box)} fill="rgb{tuple(colour)}" fill-opacity="{alpha / 255:.2f}"/>'
            )
        for box, colour in panel.frames:
            parts.append(f'{_rectangle(box)} fill="none" stroke="rgb{colour}"/>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rectangle(box: tuple[float, float, float, float]) -> str:
    left, top, right, bottom = box
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
    )
