"""Models without weights: logits come from a table or from a scripted function of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from dlm_decode.canvas import IMAGE_TOKEN_ID, Canvas, Prompt, VisualSpan
from dlm_decode.cost import CostMeter, Geometry, forward_flops
from dlm_decode.decode import decode
from dlm_decode.models.special_ids import SpecialIds
from dlm_decode.predictor import Predictor, View
from dlm_decode.record import StepRecord
from dlm_decode.samplers import make
from dlm_decode.settings import Settings

MASK, EOS, PAD, VOCABULARY = 9, 8, 7, 10
LogitsOf = Callable[[Tensor, Tensor], Tensor]


@dataclass
class FakeModel:
    """Embeddings carry the token id, hidden states carry (position, token); `logits_of` maps both
    to logits.

    Args:
        logits_of: `(positions (N,), tokens (N,)) -> (N, V)`; positions count from the first real
            prompt token.
        vocab_size: V.
    """

    logits_of: LogitsOf
    vocab_size: int = VOCABULARY
    shift_logits: bool = False
    num_valid_tokens: int | None = None
    calls: list[tuple[int, ...]] = field(default_factory=list)
    head_calls: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.special_ids = SpecialIds(mask=MASK, eos=EOS, pad=PAD, stop=(EOS,))
        self.geometry = Geometry(2, 4, 2, 2, 2, 8, self.vocab_size)
        self.config = SimpleNamespace(max_position_embeddings=None)

    def embed(self, ids: Tensor) -> Tensor:
        return ids.float()[..., None]

    def hidden_states(
        self, embeds: Tensor, positions: Tensor, key_mask: Tensor | None = None
    ) -> Tensor:
        self.calls.append(tuple(embeds.shape[:2]))
        return torch.cat([positions[..., None].float(), embeds], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        self.head_calls.append(len(hidden))
        return self.logits_of(hidden[:, 0].long(), hidden[:, 1].long()).clone()


def table_model(table: Tensor, prompt_length: int) -> FakeModel:
    """Logits depend on the canvas position only: `table` is `(T, V)`."""
    return FakeModel(
        lambda positions, tokens: table[positions - prompt_length], vocab_size=table.shape[1]
    )


@dataclass
class Run:
    tokens: Tensor
    is_open: Tensor
    records: list[StepRecord]
    canvas: Canvas
    meter: CostMeter
    baseline_flops: list[int]


def run(
    model: FakeModel,
    prompt_lengths: list[int],
    settings: Settings,
    *,
    sampler: object = "baseline",
    stops: list[tuple[int, ...]] | None = None,
    last: tuple[int, ...] = (),
    tokens: Tensor | None = None,
    suppressed: tuple[int, ...] = (),
    num_visual: int = 0,
    probes: tuple[View, ...] = (),
) -> Run:
    """Decodes with rows of the given prompt lengths; prompt ids are 1, the first `num_visual` of
    them visual."""
    num_rows = len(prompt_lengths)
    if tokens is None:
        tokens = torch.full((num_rows, settings.gen_length), MASK)
    canvas = Canvas.create(tokens, tokens == MASK)
    prompts = [_prompt(length, num_visual) for length in prompt_lengths]
    meter = CostMeter(model.geometry, num_rows)
    baseline_flops = []
    for row, length in enumerate(prompt_lengths):
        total = length + settings.gen_length
        steps = settings.blocks.num_steps((tokens[row] == MASK).tolist())
        baseline_flops.append(steps * forward_flops(model.geometry, total, total))
    seeds = settings.seed if isinstance(settings.seed, tuple) else (settings.seed,) * num_rows
    predictor = Predictor(
        model,
        prompts,
        canvas,
        settings=settings,
        generators=[torch.Generator().manual_seed(seed) for seed in seeds],
        meter=meter,
        suppressed_ids=suppressed,
        baseline_flops=baseline_flops,
    )
    records: list[StepRecord] = []
    decode(
        predictor,
        make(sampler),
        settings,
        stops=stops or [],
        last=last,
        on_step=records.append,
        probes=probes,
    )
    return Run(canvas.tokens, canvas.is_open, records, canvas, meter, baseline_flops)


def _prompt(length: int, num_visual: int) -> Prompt:
    is_visual = torch.arange(length) < num_visual
    ids = torch.where(is_visual, IMAGE_TOKEN_ID, 1)
    spans = (VisualSpan(0, num_visual, 0),) if num_visual else ()
    return Prompt(ids[:, None].float(), ids, is_visual, spans)
