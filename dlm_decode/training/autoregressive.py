"""Stages B and C of the autoregressive twin: a Llama learns to answer, word after word.

Loss: cross-entropy of the next word, over the answer only. A causal model learns from every word of
an answer at once, so it needs fewer questions than the diffusion twin.

One more thing is asked of it while it learns: at every option of a choice, and at the thing a
yes-or-no question names, a linear head on the last layer but one tells whether that is in the
picture. This teaches the look-up four times per question; the head is not exported.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from dlm_decode.eval.scene_questions import SceneSample
from dlm_decode.eval.scenes import COLOURS
from dlm_decode.training.data import ScenePool
from dlm_decode.training.questions import ANSWER_WORDS, NUM_PATCHES, VERDICTS, SceneDrawer
from dlm_decode.training.stages import TrainingStage, accuracy_by_kind, run_stages
from dlm_decode.training.tower import VISION_CONFIG

__all__ = [
    "NUM_WATCHED",
    "ArDrawer",
    "ArEncoder",
    "ArReader",
    "greedy_hits",
    "model_config",
    "train_ar",
]

_IGNORED = -100
_BLIND_SHARE = 0.06
_FLAG_WEIGHT = 0.5
NUM_WATCHED = 600
"""Held-out questions that are watched during training."""


def model_config(ids: dict[str, int]) -> LlavaConfig:
    """The whole model, for a vocabulary."""
    text = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        bos_token_id=ids["<s>"],
        eos_token_id=ids["</s>"],
        pad_token_id=ids["<pad>"],
    )
    vision = CLIPVisionConfig(**VISION_CONFIG, hidden_act="gelu_pytorch_tanh")
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=ids["<image>"],
        image_seq_length=NUM_PATCHES,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
        tie_word_embeddings=False,
    )


class ArReader(nn.Module):
    """Projector and language model: everything behind the tower."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self.projector = LlavaMultiModalProjector(config)
        text: Any = config.text_config
        self.language = LlamaForCausalLM(text)
        width: Any = self.language.config.hidden_size
        self.flag = nn.Linear(width, 1)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """States `(B, n, D)` for the head of the language model, and `(B, n)` flag logits."""
        embeds = self.language.get_input_embeddings()(batch["tokens"])
        if "features" in batch:
            index = batch["visual_index"]
            projected = self.projector(batch["features"])
            embeds = torch.cat([embeds[:, :index], projected, embeds[:, index:]], dim=1)
        out = self.language.model(
            inputs_embeds=embeds,
            position_ids=batch["positions"],
            # Padding is on the right, where a causal model does not see it. A mask has to be given
            # though: without one, gaps in the positions are read as borders of packed sequences.
            attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
            output_hidden_states=True,
            use_cache=False,
        )
        return out.last_hidden_state, self.flag(out.hidden_states[-2]).squeeze(-1)


class ArEncoder:
    """Text to ids, in the layout of LLaVA-1.5: `USER: <image>`, a new line, the question.

    Args:
        tokenizer: the autoregressive model's tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.ids: dict[str, int] = tokenizer.get_vocab()
        self.head = self.words("<s> user :")
        self.tail = self.words("assistant :")
        self.newline, self.end = self.ids["\n"], self.ids["</s>"]
        self.weights = torch.ones(len(self.ids))
        for word in ANSWER_WORDS & self.ids.keys():
            self.weights[self.ids[word]] = 3.0
        for word in VERDICTS:
            self.weights[self.ids[word]] = 5.0
        self.colours = {self.ids[colour] for colour in COLOURS}

    def words(self, text: str) -> list[int]:
        """Ids of a text whose tokens are separated by spaces."""
        return [self.ids[word] for word in text.split()]

    def batch(self, samples: list[SceneSample], *, has_image: bool) -> dict[str, Tensor]:
        """Text of a batch, padded on the right.

        Args:
            samples: B questions.
            has_image: leave room for patches behind the head, and break the line behind them.

        Returns:
            `tokens (B, n)`; `labels (B, n)`, the next word of the answer at each token, and
            `flags (B, n)`, 1 where something named is in the picture and 0 where it is not. Both
            are -100 elsewhere.
        """
        lines = [self.newline] if has_image else []
        rows = [
            [*self.head, *lines, *self.words(sample.question), *self.tail] for sample in samples
        ]
        answers = [[*self.words(sample.answer), self.end] for sample in samples]
        longest = max(len(row) + len(answer) for row, answer in zip(rows, answers, strict=True)) - 1
        arrays = {
            "tokens": np.full((len(rows), longest), self.end),
            "labels": np.full((len(rows), longest), _IGNORED),
            "flags": np.full((len(rows), longest), _IGNORED),
        }
        for place, (row, answer, sample) in enumerate(zip(rows, answers, samples, strict=True)):
            whole = [*row, *answer]
            arrays["tokens"][place, : len(whole) - 1] = whole[:-1]
            arrays["labels"][place, len(row) - 1 : len(whole) - 1] = answer
            if sample.kind in ("choice", "exists"):
                named = [at + 1 for at, token in enumerate(row) if token in self.colours]
                for at in named:
                    right = row[at - 3] if sample.kind == "choice" else self.ids["yes"]
                    arrays["flags"][place, at] = int(answer[0] == right)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class ArDrawer(SceneDrawer):
    """Draws training batches.

    Args:
        pool: scenes.
        features: `(n, 144, d)` float16.
        encoder: text to ids.
        kind_weights: relative frequency of each kind of question.
        practises: ask choices among fewer options as well.
    """

    def __init__(
        self,
        pool: ScenePool,
        features: np.ndarray,
        encoder: ArEncoder,
        kind_weights: dict[str, float] | None = None,
        *,
        practises: bool = False,
    ) -> None:
        super().__init__(pool, features, kind_weights, practises=practises)
        self.encoder = encoder

    def batches(self, stage: TrainingStage, seed: int, step: int) -> list[dict[str, Tensor]]:
        """Everything that a training step needs, a function of `(seed, stage, step)`.

        Questions without a picture, and those with long texts, are put apart.
        """
        rng = random.Random(f"{seed}/{stage.name}/{step}")
        numbers = np.random.default_rng(rng.getrandbits(64))
        samples, rows = self.samples(rng, stage.batch)
        is_blind = numbers.random(len(rows)) < _BLIND_SHARE
        is_long = np.array([sample.form in ("choice", "describe") for sample in samples])
        return [
            self.group([samples[at] for at in places], rows[places], stage, numbers, has_image)
            for places, has_image in (
                (np.flatnonzero(~is_blind & ~is_long), True),
                (np.flatnonzero(~is_blind & is_long), True),
                (np.flatnonzero(is_blind), False),
            )
            if len(places)
        ]

    def group(
        self,
        samples: list[SceneSample],
        rows: np.ndarray,
        stage: TrainingStage,
        numbers: np.random.Generator,
        has_image: bool = True,
    ) -> dict[str, Tensor]:
        """One batch for `ArReader`; labels and flags cover the patches as well."""
        text = self.encoder.batch(samples, has_image=has_image)
        num_head, length = len(self.encoder.head), text["tokens"].shape[1]
        if not has_image:
            # What is in the picture can not be told without one.
            text["flags"][:] = _IGNORED
            return {**text, "positions": torch.arange(length).expand(len(rows), -1)}
        features, index = self.patches(rows, stage, numbers)
        order = np.tile(np.arange(length), (len(rows), 1))
        order[:, num_head:] += NUM_PATCHES
        order = np.concatenate([order[:, :num_head], index + num_head, order[:, num_head:]], axis=1)
        gap = torch.full(index.shape, _IGNORED)
        wide = {
            name: torch.cat([text[name][:, :num_head], gap, text[name][:, num_head:]], dim=1)
            for name in ("labels", "flags")
        }
        return {
            **wide,
            "tokens": text["tokens"],
            "positions": torch.from_numpy(order),
            "features": features,
            "visual_index": torch.tensor(num_head),
        }


def _step_loss(reader: ArReader, batches: list[dict[str, Tensor]], weights: Tensor) -> Tensor:
    losses, total, flags = [], torch.zeros(()), []
    for batch in batches:
        states, told = reader(batch)
        where = (batch["labels"] != _IGNORED).nonzero(as_tuple=True)
        targets = batch["labels"][where]
        scores = reader.language.lm_head(states[where])
        weight = weights[targets]
        losses.append((functional.cross_entropy(scores, targets, reduction="none") * weight).sum())
        total += weight.sum()
        seen = batch["flags"] != _IGNORED
        flags.append((told[seen], batch["flags"][seen].float()))
    told, wanted = (torch.cat(parts) for parts in zip(*flags, strict=True))
    loss = torch.stack(losses).sum() / total
    if len(told):
        loss = loss + _FLAG_WEIGHT * functional.binary_cross_entropy_with_logits(told, wanted)
    return loss


@torch.no_grad()
def greedy_hits(
    reader: ArReader,
    drawer: ArDrawer,
    samples: list[SceneSample],
    rows: np.ndarray,
    stage: TrainingStage,
) -> list[bool]:
    """Which questions greedy decoding answers rightly.

    It writes an answer exactly when every word of the answer is the likeliest after those before
    it, which one pass over the answer tells. Of a choice and of yes or no, the first word counts.
    """
    hits = []
    for start in range(0, len(samples), 64):
        part = samples[start : start + 64]
        batch = drawer.group(part, rows[start : start + 64], stage, np.random.default_rng(0))
        best = reader.language.lm_head(reader(batch)[0]).argmax(-1)
        is_right = (best == batch["labels"]) | (batch["labels"] == _IGNORED)
        first = (batch["labels"] != _IGNORED).int().argmax(1)
        for row, sample in enumerate(part):
            is_short = sample.kind in ("choice", "exists")
            hits.append(bool(is_right[row, first[row]] if is_short else is_right[row].all()))
    return hits


def train_ar(
    drawer: ArDrawer,
    heldout: ArDrawer,
    stages: list[TrainingStage],
    folder: Path,
    *,
    seed: int = 0,
    evaluate_every: int = 500,
    start: dict[str, Tensor] | None = None,
) -> ArReader:
    """Runs the stages in order; see `run_stages` about saving and resuming.

    Args:
        drawer: training questions.
        heldout: measured at each evaluation.
        stages: the curriculum.
        folder: checkpoint and log.
        seed: of weights and batches.
        evaluate_every: steps between two evaluations.
        start: weights of an `ArReader` to begin with; fresh ones otherwise.
    """
    torch.manual_seed(seed)
    reader = ArReader(model_config(drawer.encoder.ids))
    if start is not None:
        reader.load_state_dict(start)
    weights = drawer.encoder.weights

    def loss_of(stage: TrainingStage, step: int) -> Tensor:
        own = torch.ones_like(weights) if stage.is_flat else weights
        return _step_loss(reader, drawer.batches(stage, seed, step), own)

    def evaluate(stage: TrainingStage) -> dict[str, float]:
        samples, rows = heldout.samples(random.Random("evaluation"), NUM_WATCHED)
        return accuracy_by_kind(samples, greedy_hits(reader, heldout, samples, rows, stage))

    run_stages(reader, stages, folder, loss_of, evaluate, every=evaluate_every)
    return reader
