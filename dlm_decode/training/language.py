"""Stages B and C: the language model learns to answer.

It sees few visual tokens first, then all of them.

Loss: LLaDA's masked cross-entropy (arXiv 2502.09992, supervised fine-tuning) over a response of
fixed length, padded with the end-of-sequence token. Words that carry the answer weigh more, padding
weighs less, and a share of the samples is fully masked, because decoding starts there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dlm_decode.canvas import IMAGE_TOKEN_ID, Canvas, Prompt
from dlm_decode.cost import CostMeter
from dlm_decode.decode import decode
from dlm_decode.eval.generated import GeneratedSample
from dlm_decode.eval.scene_questions import SceneSample, options_of, score
from dlm_decode.models.configuration import LLaDAConfig
from dlm_decode.models.llada import LLaDAModelLM
from dlm_decode.predictor import Predictor
from dlm_decode.samplers.baseline import Baseline
from dlm_decode.settings import Settings
from dlm_decode.training.data import SPECIAL_TOKENS, ScenePool
from dlm_decode.training.lookup import ask_for_letters
from dlm_decode.training.questions import ANSWER_WORDS, NUM_PATCHES, VERDICTS, SceneDrawer
from dlm_decode.training.stages import TrainingStage, accuracy_by_kind, run_stages

__all__ = ["CANVAS", "Drawer", "Encoder", "Reader", "Stage", "greedy_answers", "train_language"]

CANVAS = 32
LANGUAGE_CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}
_NUM_VISUAL = NUM_PATCHES + 1  # a newline vector follows the patches
_BLIND_SHARE = 0.06  # questions without a picture
_BLIND_PRACTICE_SHARE = 0.3  # the same of choices, when looking options up is practised
_LOOKUP_SHARE = 0.5  # choices that ask for letters alone


@dataclass(frozen=True)
class Stage(TrainingStage):
    """One stretch of training on masked responses.

    Attributes:
        full_share: share of the questions whose whole answer is masked, as decoding begins.
    """

    full_share: float = 0.3


class Reader(nn.Module):
    """Projector, newline vector and language model: everything behind the tower."""

    def __init__(self, vocab_size: int, vision_width: int) -> None:
        super().__init__()
        width = int(LANGUAGE_CONFIG["hidden_size"])
        self.projector = nn.Sequential(
            nn.Linear(vision_width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.newline = nn.Parameter(torch.randn(width) * 0.02)
        mask = SPECIAL_TOKENS.index("<|mdm_mask|>")
        self.language = LLaDAModelLM(
            LLaDAConfig(**LANGUAGE_CONFIG, vocab_size=vocab_size, mask_token_id=mask)
        )

    def visual(self, features: Tensor, visual_index: Tensor) -> Tensor:
        """Visual tokens `(B, v, D)`; arguments as in `forward`."""
        newline = self.newline.expand(len(features), 1, -1)
        return torch.cat([self.projector(features), newline], dim=1)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        is_real: Tensor,
        features: Tensor,
        visual_index: Tensor,
    ) -> Tensor:
        """States `(B, v + n, D)`.

        Args:
            tokens: `(B, n)` text ids, the response last.
            positions: `(B, n)` rotary positions of the text.
            is_real: `(B, v + n)` bool, over visual tokens and text.
            features: `(B, v - 1, d)` tower features; a newline vector is put behind them.
            visual_index: `(B, v)` rotary positions of the visual tokens.
        """
        visual = self.visual(features, visual_index)
        embeds = torch.cat([visual, self.language.embed(tokens)], dim=1)
        order = torch.cat([visual_index, positions], dim=1)
        return self.language.hidden_states(embeds, order, is_real)


class Encoder:
    """Text to ids, in the layout that decoding will use.

    Args:
        tokenizer: the tiny model's tokenizer.
        canvas: positions of a response.
        ending: what ends every question.
    """

    def __init__(self, tokenizer: Any, canvas: int = CANVAS, ending: str = "") -> None:
        self.canvas, self.ending = canvas, ending
        self.ids: dict[str, int] = tokenizer.get_vocab()
        self.tokenizer = tokenizer
        self.pad, self.mask = self.ids["<|endoftext|>"], self.ids["<|mdm_mask|>"]
        head = "<|startoftext|> <|start_header_id|> user <|end_header_id|> \n\n"
        self.head = [self.ids[word] for word in head.split(" ")]
        tail = "<|eot_id|> <|start_header_id|> assistant <|end_header_id|> \n\n"
        self.tail = [self.ids[word] for word in tail.split(" ")]
        self.newline = self.ids["\n"]
        self.weights = torch.full((len(self.ids),), 0.5)
        for word, index in self.ids.items():
            if word in ANSWER_WORDS:
                self.weights[index] = 3.0
        for word in VERDICTS:
            self.weights[self.ids[word]] = 6.0
        self.weights[: len(SPECIAL_TOKENS)] = 0.05

    def words(self, text: str) -> list[int]:
        """Ids of a text whose tokens are separated by spaces."""
        return [self.ids[word] for word in text.split()]

    def batch(self, samples: Sequence[GeneratedSample], gap: np.ndarray) -> dict[str, Tensor]:
        """Text ids, positions and the response of a batch; the prompt is padded on the left.

        Args:
            samples: B questions.
            gap: `(B,)` rotary positions left free for visual tokens.

        Returns:
            `prompt (B, n)`, `positions (B, n + c)`, `is_real (B, n + c)`, `response (B, c)` with a
            canvas of c.
        """
        rows = [
            [self.newline, *self.words(f"{sample.question} {self.ending}"), *self.tail]
            for sample in samples
        ]
        longest = max(map(len, rows))
        num_head, num_prompt = len(self.head), len(self.head) + longest
        prompt = np.full((len(rows), num_prompt), self.pad)
        response = np.full((len(rows), self.canvas), self.pad)
        positions = np.zeros((len(rows), num_prompt + self.canvas), dtype=np.int64)
        is_real = np.zeros((len(rows), num_prompt + self.canvas), dtype=bool)
        for row, (ids, sample) in enumerate(zip(rows, samples, strict=True)):
            start = longest - len(ids)
            prompt[row, start:] = [*self.head, *ids]
            answer = self.words(sample.answer)
            response[row, : len(answer)] = answer
            positions[row, start : start + num_head] = np.arange(num_head)
            positions[row, start + num_head :] = (
                np.arange(len(ids) + self.canvas) + num_head + gap[row]
            )
            is_real[row, start:] = True
        arrays = {
            "prompt": prompt,
            "positions": positions,
            "is_real": is_real,
            "response": response,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Questions(Protocol):
    """What training and its watching ask; `Drawer` has them about scenes.

    Attributes:
        encoder: text to ids.
        features: of every picture or clip.
        num_visual: rotary positions that visual tokens take.
        score: whether an answer is right.
    """

    encoder: Encoder
    features: Any
    num_visual: int
    score: Any

    def samples(self, rng: random.Random, count: int) -> tuple[Sequence[Any], np.ndarray]:
        """`count` questions and the indices of what they are about."""
        ...

    def visual(
        self,
        rows: np.ndarray,
        stage: TrainingStage,
        has_image: np.ndarray,
        numbers: np.random.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Features, rotary positions `(B, v)` and which are real `(B, v)`."""
        ...

    def batches(self, stage: Stage, seed: int, step: int) -> list[dict[str, Tensor]]:
        """Everything that a training step needs."""
        ...


class Drawer(SceneDrawer):
    """Draws training batches from a pool whose features are known.

    Args:
        pool: scenes.
        features: `(n, 144, d)` float16.
        encoder: text to ids.
        kind_weights: relative frequency of each kind of question.
        practises: ask choices among fewer options as well, and for letters alone.
    """

    num_visual = _NUM_VISUAL
    score = staticmethod(score)

    def __init__(
        self,
        pool: ScenePool,
        features: np.ndarray,
        encoder: Encoder,
        kind_weights: dict[str, float] | None = None,
        *,
        practises: bool = False,
    ) -> None:
        super().__init__(pool, features, kind_weights, practises=practises)
        self.encoder = encoder

    def visual(
        self,
        rows: np.ndarray,
        stage: TrainingStage,
        has_image: np.ndarray,
        numbers: np.random.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Visual tokens as the stage shows them.

        Returns:
            Features `(B, v - 1, d)`, rotary positions `(B, v)`, and which are real `(B, v)`.
        """
        features, index = self.patches(rows, stage, numbers)
        ends = np.full((len(rows), 1), NUM_PATCHES)
        positions = torch.from_numpy(np.concatenate([index, ends], axis=1)) + len(self.encoder.head)
        is_real = torch.from_numpy(np.repeat(has_image[:, None], positions.shape[1], axis=1))
        return features, positions, is_real

    def batches(self, stage: Stage, seed: int, step: int) -> list[dict[str, Tensor]]:
        """Everything that a training step needs, a function of `(seed, stage, step)`.

        Long questions are put apart, to waste less on padding. Every response is shown at full
        length: with fewer positions for short answers, their number gives the kind of answer away,
        and the question is not read.
        """
        rng = random.Random(f"{seed}/{stage.name}/{step}")
        numbers = np.random.default_rng(rng.getrandbits(64))
        samples, rows = self.samples(rng, stage.batch)
        is_choice = np.array([sample.form == "choice" for sample in samples])
        return [
            self._group([samples[place] for place in places], rows[places], stage, numbers)
            for places in (np.flatnonzero(~is_choice), np.flatnonzero(is_choice))
            if len(places)
        ]

    def _group(
        self,
        samples: list[SceneSample],
        rows: np.ndarray,
        stage: Stage,
        numbers: np.random.Generator,
    ) -> dict[str, Tensor]:
        is_practice = np.array([self.practises and sample.form == "choice" for sample in samples])
        blind_share = np.where(is_practice, _BLIND_PRACTICE_SHARE, _BLIND_SHARE)
        has_image = numbers.random(len(rows)) >= blind_share
        gap = np.where(has_image | (numbers.random(len(rows)) < 0.5), _NUM_VISUAL, 0)
        text = self.encoder.batch(samples, gap)
        features, visual_positions, visual_real = self.visual(rows, stage, has_image, numbers)
        noisy = noised(text, numbers, self.encoder.mask, stage.full_share)
        for row in np.flatnonzero(is_practice & (numbers.random(len(rows)) < _LOOKUP_SHARE)):
            ask_for_letters(
                self.encoder,
                text["response"][row],
                noisy["tokens"][row],
                noisy["is_masked"][row],
                options_of(samples[row].question),
                numbers,
                is_blind=not has_image[row],
            )
        return {
            **text,
            **noisy,
            "is_real": torch.cat([visual_real, text["is_real"]], dim=1),
            "features": features,
            "visual_index": visual_positions,
        }


def noised(
    text: dict[str, Tensor], numbers: np.random.Generator, mask: int, full_share: float | np.ndarray
) -> dict[str, Tensor]:
    """Prompt and partly masked response as `tokens`, and which positions are masked.

    Args:
        text: from `Encoder.batch`.
        numbers: draws the mask ratio of each row, uniform, and the positions.
        mask: the mask token.
        full_share: share of the rows that are masked completely, for all rows or for each.
    """
    response = text["response"]
    ratio = torch.from_numpy(numbers.random((len(response), 1)))
    is_full = torch.from_numpy(numbers.random(len(response)) < full_share)[:, None]
    is_masked = torch.from_numpy(numbers.random(response.shape)) < torch.where(is_full, 1.0, ratio)
    noisy = torch.where(is_masked, mask, response)
    return {"tokens": torch.cat([text["prompt"], noisy], dim=1), "is_masked": is_masked}


_INPUTS = ("tokens", "positions", "is_real", "features", "visual_index")


def _step_loss(reader: Reader, batches: list[dict[str, Tensor]], weights: Tensor) -> Tensor:
    losses, total = [], torch.zeros(())
    for batch in batches:
        states = reader(*(batch[name] for name in _INPUTS))[:, -batch["response"].shape[1] :]
        where = batch["is_masked"].nonzero(as_tuple=True)
        targets = batch["response"][where]
        scores = reader.language.logits(states[where])
        weight = weights[targets]
        losses.append((functional.cross_entropy(scores, targets, reduction="none") * weight).sum())
        total += weight.sum()
    return torch.stack(losses).sum() / total.clamp_min(1e-6)


@torch.no_grad()
def greedy_answers(
    reader: Reader,
    drawer: Questions,
    samples: Sequence[GeneratedSample],
    rows: np.ndarray,
    stage: TrainingStage,
    *,
    has_image: bool = True,
    per_step: int = 2,
) -> list[str]:
    """Answers by low-confidence decoding, `per_step` positions at a time.

    A quick check during training.
    """
    encoder, answers = drawer.encoder, []
    canvas_size = encoder.canvas
    settings = Settings(canvas_size, canvas_size // per_step, canvas_size)
    for start in range(0, len(samples), 64):
        part, part_rows = samples[start : start + 64], rows[start : start + 64]
        text = encoder.batch(part, np.full(len(part), drawer.num_visual if has_image else 0))
        seen = np.full(len(part), has_image)
        visual = drawer.visual(part_rows, stage, seen, np.random.default_rng(0))
        response = torch.full((len(part), canvas_size), encoder.mask)
        canvas = Canvas.create(response, torch.ones_like(response, dtype=torch.bool))
        predictor = Predictor(
            reader.language,
            _prompts(reader, text, *visual),
            canvas,
            settings=settings,
            generators=[],
            meter=CostMeter(reader.language.geometry, len(part)),
        )
        decode(predictor, Baseline(), settings)
        answers += encoder.tokenizer.batch_decode(canvas.tokens, skip_special_tokens=True)
    return answers


def _prompts(
    reader: Reader, text: dict[str, Tensor], features: Tensor, order: Tensor, is_real: Tensor
) -> list[Prompt]:
    """What the decode loop takes, from what training steps take."""
    num_prompt = text["prompt"].shape[1]
    visual = reader.visual(features, order)
    embeds = torch.cat([visual, reader.language.embed(text["prompt"])], dim=1)
    ids = torch.cat([torch.full(order.shape, IMAGE_TOKEN_ID), text["prompt"]], dim=1)
    positions = torch.cat([order, text["positions"][:, :num_prompt]], dim=1)
    keep = torch.cat([is_real, text["is_real"][:, :num_prompt]], dim=1)
    return [
        Prompt(
            embeds=embeds[row, keep[row]],
            ids=ids[row, keep[row]],
            is_visual=ids[row, keep[row]] == IMAGE_TOKEN_ID,
            position_ids=positions[row, keep[row]],
            end_position=int(text["positions"][row, num_prompt]),
        )
        for row in range(len(ids))
    ]


def train_language(
    drawer: Questions,
    heldout: Questions,
    stages: list[Stage],
    folder: Path,
    *,
    vocab_size: int,
    seed: int = 0,
    evaluate_every: int = 500,
    start: dict[str, Tensor] | None = None,
    reader: Reader | None = None,
) -> Reader:
    """Runs the stages in order; see `run_stages` about saving and resuming.

    Args:
        drawer: training questions.
        heldout: measured at each evaluation.
        stages: the curriculum.
        folder: checkpoint and log.
        vocab_size: of the tokenizer.
        seed: of weights and batches.
        evaluate_every: steps between two evaluations.
        start: weights of a `Reader` to begin with; fresh ones otherwise.
        reader: what is trained; a `Reader` by default.
    """
    torch.manual_seed(seed)
    if reader is None:
        reader = Reader(vocab_size, drawer.features.shape[-1])
    if start is not None:
        reader.load_state_dict(start)
    weights = drawer.encoder.weights

    def loss_of(stage: Stage, step: int) -> Tensor:
        own = torch.ones_like(weights) if stage.is_flat else weights
        return _step_loss(reader, drawer.batches(stage, seed, step), own)

    def evaluate(stage: Stage) -> dict[str, float]:
        return _evaluate(reader, heldout, stage)

    run_stages(reader, stages, folder, loss_of, evaluate, every=evaluate_every)
    return reader


def _evaluate(
    reader: Reader, heldout: Questions, stage: Stage, count: int = 400
) -> dict[str, float]:
    samples, rows = heldout.samples(random.Random("evaluation"), count)
    answers = greedy_answers(reader, heldout, samples, rows, stage)
    hits = [heldout.score(sample, answer) for sample, answer in zip(samples, answers, strict=True)]
    return accuracy_by_kind(samples, hits)
