"""Clips as training data for a language model whose tower and projector stay as they are.

A picture's tokens are computed once: what the tower and the projector make of it, pooled as VidLaDA
pools frames.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlm_decode.eval.clip_questions import KINDS, ClipSample, ask, practice, score
from dlm_decode.eval.clips import FRAMES_PER_STEP, NUM_FRAMES, NUM_STEPS, Clip
from dlm_decode.eval.scenes import IMAGE_SIZE
from dlm_decode.models.anyres import pixels_of
from dlm_decode.models.visual_layout import pool_frames
from dlm_decode.training.data import GRID
from dlm_decode.training.language import Encoder, Reader, Stage, noised
from dlm_decode.training.lookup import ask_for_letters
from dlm_decode.training.stages import TrainingStage
from dlm_decode.training.tower import VISION_CONFIG

__all__ = ["POOLED", "ClipDrawer", "ClipReader", "encode_clips"]

POOLED = GRID // 2
_LINE = POOLED + 1  # a newline vector ends every row
_FRAME = POOLED * _LINE
_CELL = IMAGE_SIZE / POOLED
_BLIND_SHARE = 0.35  # no video, but the answer up to its letter: practice in looking options up
_PRACTICE_SHARE = 0.2
_LOOKUP_SHARE = 0.4
_BLIND_LOOKUP_SHARE = 0.8


class ClipReader(Reader):
    """As `Reader`, for tokens that are projected and pooled already; its projector stays.

    Args:
        encoder: text to ids.
        vision_width: of the tower.
    """

    def __init__(self, encoder: Encoder, vision_width: int = VISION_CONFIG["hidden_size"]) -> None:
        super().__init__(len(encoder.ids), vision_width)
        self.num_head = len(encoder.head)
        self.projector.requires_grad_(False)

    def visual(self, features: Tensor, visual_index: Tensor) -> Tensor:
        """The tokens `(B, v, D)`, with the newline vector at the end of every row.

        Args:
            features: `(B, v, D)`; not looked at where a newline is.
            visual_index: `(B, v)` rotary positions.
        """
        is_newline = (visual_index - self.num_head) % _LINE == POOLED
        return torch.where(is_newline[..., None], self.newline, features)


@torch.inference_mode()
def encode_clips(model: Any, clips: Sequence[Clip]) -> np.ndarray:
    """Pooled tokens `(n, 8, 36, D)` float16 of every clip's pictures.

    Args:
        model: a LLaDA-V or VidLaDA that reads pictures of 96 x 96.
        clips: n of them.
    """
    found = []
    for clip in clips:
        pixels = torch.stack([pixels_of(picture, IMAGE_SIZE) for picture in clip.steps()])
        pooled = pool_frames(model.encode_tiles(pixels), "bilinear")
        found.append(pooled.flatten(1, 2).half().numpy())
    return np.stack(found)


class ClipDrawer:
    """Draws training batches from clips whose tokens are known.

    Args:
        clips: n clips.
        features: from `encode_clips`.
        encoder: text to ids.
        kind_weights: relative frequency of each kind of question, `"place"` included.
    """

    num_visual = NUM_FRAMES * _FRAME
    score = staticmethod(score)

    def __init__(
        self,
        clips: Sequence[Clip],
        features: Sequence[np.ndarray] | np.ndarray,
        encoder: Encoder,
        kind_weights: dict[str, float] | None = None,
    ) -> None:
        self.clips, self.features, self.encoder = clips, features, encoder
        self.kind_weights = kind_weights or dict.fromkeys(KINDS, 1.0)

    def samples(
        self, rng: random.Random, count: int, *, practises: bool = False
    ) -> tuple[list[ClipSample], np.ndarray]:
        """`count` questions and the indices of their clips; several may share a clip."""
        samples: list[ClipSample] = []
        rows: list[int] = []
        kinds, weights = list(self.kind_weights), list(self.kind_weights.values())
        while len(samples) < count:
            row = rng.randrange(len(self.clips))
            kind = rng.choices(kinds, weights)[0]
            is_easy = kind == "place" or (practises and rng.random() < _PRACTICE_SHARE)
            sample = (practice if is_easy else ask)(self.clips[row], kind, rng)
            if sample is not None:
                samples.append(sample)
                rows.append(row)
        return samples, np.array(rows)

    def visual(
        self,
        rows: np.ndarray,
        stage: TrainingStage,
        has_image: np.ndarray,
        numbers: np.random.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Visual tokens as the stage shows them.

        Returns:
            Features `(B, v, D)`, rotary positions `(B, v)`, and which are real `(B, v)`.
        """
        if stage.patches is None:
            index = np.broadcast_to(np.arange(self.num_visual), (len(rows), self.num_visual))
            is_there = np.ones(index.shape, dtype=bool)
        else:
            shown = [self._few(self.clips[row], stage, numbers) for row in rows]
            longest = max(map(len, shown))
            index = np.zeros((len(rows), longest), dtype=np.int64)
            is_there = np.zeros(index.shape, dtype=bool)
            for number, own in enumerate(shown):
                index[number, : len(own)] = own
                is_there[number, : len(own)] = True
        frame, rest = np.divmod(index, _FRAME)
        line, column = np.divmod(rest, _LINE)
        cell = line * POOLED + np.minimum(column, POOLED - 1)
        features = np.stack(
            [
                self.features[row][frame[number] // FRAMES_PER_STEP, cell[number]]
                for number, row in enumerate(rows)
            ]
        )
        positions = torch.from_numpy(index + len(self.encoder.head))
        is_real = torch.from_numpy(is_there & has_image[:, None])
        return torch.from_numpy(features).float(), positions, is_real

    def _few(self, clip: Clip, stage: TrainingStage, numbers: np.random.Generator) -> np.ndarray:
        """Tokens where the objects are, one frame of each step, and some others."""
        chosen: set[int] = set()
        offsets = numbers.integers(FRAMES_PER_STEP, size=NUM_STEPS)
        for step in range(NUM_STEPS):
            frame = step * FRAMES_PER_STEP + int(offsets[step])
            for item in clip.objects:
                centre = item.at(step)
                if centre is not None:
                    chosen.update(frame * _FRAME + token for token in _near(centre, stage.patches))
        background = numbers.integers(self.num_visual, size=stage.background)
        return np.array(sorted(chosen | set(background.tolist())))

    def batches(self, stage: Stage, seed: int, step: int) -> list[dict[str, Tensor]]:
        """Everything that a training step needs, a function of `(seed, stage, step)`.

        Long questions are put apart, to waste less on padding.
        """
        rng = random.Random(f"{seed}/{stage.name}/{step}")
        numbers = np.random.default_rng(rng.getrandbits(64))
        samples, rows = self.samples(rng, stage.batch, practises=not stage.is_flat)
        has_video = numbers.random(len(rows)) >= _BLIND_SHARE
        load = [
            len(sample.question.split()) + has * 10 * len(sample.clip.objects)
            for sample, has in zip(samples, has_video, strict=True)
        ]
        order = np.argsort(load, kind="stable")
        groups = np.array_split(order, max(1, stage.batch // 24))
        return [
            self._group([samples[at] for at in part], rows[part], has_video[part], stage, numbers)
            for part in groups
        ]

    def _group(
        self,
        samples: list[ClipSample],
        rows: np.ndarray,
        has_video: np.ndarray,
        stage: Stage,
        numbers: np.random.Generator,
    ) -> dict[str, Tensor]:
        gap = np.where(has_video | (numbers.random(len(rows)) < 0.5), self.num_visual, 0)
        text = self.encoder.batch(samples, gap)
        features, visual_index, visual_real = self.visual(rows, stage, has_video, numbers)
        noisy = noised(text, numbers, self.encoder.mask, stage.full_share)
        share = np.where(has_video, _LOOKUP_SHARE, _BLIND_LOOKUP_SHARE)
        for row in np.flatnonzero(numbers.random(len(rows)) < share):
            if not samples[row].options:
                continue
            ask_for_letters(
                self.encoder,
                text["response"][row],
                noisy["tokens"][row],
                noisy["is_masked"][row],
                samples[row].options,
                numbers,
                is_blind=not has_video[row],
            )
        if not has_video.any():
            features, visual_index, visual_real = (
                part[:, :1] for part in (features, visual_index, visual_real)
            )
        return {
            **text,
            **noisy,
            "is_real": torch.cat([visual_real, text["is_real"]], dim=1),
            "features": features,
            "visual_index": visual_index,
        }


def _near(centre: tuple[float, float], count: int | None) -> list[int]:
    """The `count` tokens of a frame that lie closest to a point."""
    column, line = (part / _CELL - 0.5 for part in centre)
    places = [(y, x) for y in range(POOLED) for x in range(POOLED)]
    places.sort(key=lambda place: (place[0] - line) ** 2 + (place[1] - column) ** 2)
    return [y * _LINE + x for y, x in places[:count]]
