"""One response of an autoregressive model: its forwards, its tokens, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlm_decode.autoregressive_inputs import Batch
from dlm_decode.canvas import Canvas
from dlm_decode.confidence import Proposal
from dlm_decode.cost import Cost, CostMeter, Work, forward_flops, kv_bytes_per_token, layer_flops
from dlm_decode.record import StepRecord
from dlm_decode.samplers.autoregressive import Autoregressive
from dlm_decode.vision.attachment import Attachment
from dlm_decode.vision.eviction import Evicted, Evictor

if TYPE_CHECKING:
    from dlm_decode.autoregressive import AutoregressiveVlm

__all__ = ["Response"]

VIEW = "FULL"
PREFILL, DECODE = "prefill", "decode"
"""Kinds of forwards, see `dlm_decode.cost.Forward`."""


class Response:
    """One call's forwards; B rows, T tokens of the response at most.

    Args:
        vlm: the model.
        attachment: the stages that are attached to it.
        evictor: the stage that shortens the cache behind the prefill, if any.
        meter: charged with every forward.
        batch: the prompts.
        gen_length: T.
    """

    def __init__(
        self,
        vlm: AutoregressiveVlm,
        attachment: Attachment,
        evictor: Evictor,
        meter: CostMeter,
        batch: Batch,
        gen_length: int,
    ) -> None:
        self._vlm, self._attachment, self._meter = vlm, attachment, meter
        self._evictor = evictor
        self._evicted: Evicted | None = None
        self._inputs, special = batch.inputs, vlm.special_ids
        num_rows = len(self._inputs["input_ids"])
        filler = special.pad if special.pad is not None else special.eos
        tokens = torch.full((num_rows, gen_length), filler or 0, device=vlm.device)
        self.canvas = Canvas.create(tokens, torch.ones_like(tokens, dtype=torch.bool))
        self._is_active = torch.ones(num_rows, dtype=torch.bool, device=vlm.device)
        self._positions = torch.zeros(0)
        self._cache: Any = None
        self._num_fed = [0] * num_rows
        self._lengths: list[list[int]] = []  # what is cached of each row's prompt, by layer

    def prefill(self) -> Tensor:
        """`(B, V)` logits of the first tokens."""
        inputs, architecture = self._inputs, self._vlm.architecture
        positions = architecture.position_ids(self._vlm.model, inputs)
        text_model = architecture.text_model(self._vlm.model)
        with self._evictor.watching(text_model, lambda: self._attachment.prompts):
            outputs = self._vlm.model(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **architecture.forward_arguments(inputs),
            )
        self._cache = outputs.cache
        # The text in front of the response has the same number on every axis.
        self._positions = positions.amax(dim=-1, keepdim=True)
        if positions.dim() == 3:
            self._positions = self._positions.amax(dim=0, keepdim=True).expand_as(self._positions)
        rows = range(len(self.canvas.tokens))
        by_layer, scores = self._attachment.layer_lengths, self._attachment.layer_scores
        self._lengths = [[lengths[row] for lengths in by_layer] for row in rows]
        work = [
            [
                _causal(length, scored[row] + self._evictor.num_scores(length))
                for length, scored in zip(self._lengths[row], scores, strict=True)
            ]
            for row in rows
        ]
        keys = [lengths[0] for lengths in self._lengths]
        self._evicted = self._evictor.evict(self._cache, self._attachment.prompts)
        if self._evicted is not None:
            self._attachment.shortened(self._evicted.mask)
            num_layers = self._vlm.geometry.num_layers
            self._lengths = [[length] * num_layers for length in self._evicted.lengths]
        self._charge(PREFILL, rows, work, keys)
        return outputs.logits[:, -1].float()

    def decode(self, position: int, is_active: Sequence[bool]) -> Tensor:
        """`(B, V)` logits of the tokens behind `position`.

        Rows that are done are fed a filler, and not charged.
        """
        mask = self._inputs["attention_mask"]
        self._inputs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        self._positions = self._positions + 1
        outputs = self._vlm.model(
            input_ids=self.canvas.tokens[:, position, None],
            attention_mask=self._inputs["attention_mask"],
            position_ids=self._positions,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        rows = [row for row, is_running in enumerate(is_active) if is_running]
        for row in rows:
            self._num_fed[row] += 1
        self._charge(
            DECODE,
            rows,
            [[Work(1, n + self._num_fed[row]) for n in self._lengths[row]] for row in rows],
            [self._lengths[row][0] + self._num_fed[row] for row in rows],
        )
        return outputs.logits[:, -1].float()

    def commit(self, position: int, proposal: Proposal) -> Tensor:
        """Writes a token into each row that is not done; `(B, T)` bool, where."""
        canvas = self.canvas
        commit = torch.zeros_like(canvas.is_open)
        commit[:, position] = self._is_active
        canvas.tokens = torch.where(commit, proposal.tokens[:, None], canvas.tokens)
        canvas.is_open = canvas.is_open & ~commit
        return commit

    def state(self, proposal: Proposal) -> tuple[list[bool], bool]:
        """Which rows go on, and whether a logit was NaN; the step's one read of the device."""
        self._is_active = self._is_active & (self.canvas.stop_position == self.canvas.width)
        flags = torch.cat([self._is_active, proposal.log_prob.isnan().any()[None]]).tolist()
        return flags[:-1], flags[-1]

    def record(
        self, position: int, seconds: float, commit: Tensor, proposal: Proposal
    ) -> StepRecord:
        """What happened at `position`."""
        canvas = self.canvas
        confidence = proposal.log_prob.exp()[:, None].expand_as(commit)
        none = torch.full_like(canvas.tokens[:, :1], -1).expand_as(commit)
        return StepRecord(
            index=position,
            seconds=seconds,
            forwards=tuple(self._meter.take_pending()),
            active=commit[:, position],
            block=torch.zeros_like(canvas.stop_position),
            commit=commit,
            tokens=proposal.tokens[:, None].expand_as(commit),
            confidence=confidence,
            draft=none,
            draft_confidence=confidence,
            reasons={Autoregressive.name: commit},
            info={},
            lead=0,
        )

    def _charge(
        self,
        kind: str,
        rows: Sequence[int],
        work: Sequence[Sequence[Work]],
        keys: Sequence[int],
    ) -> None:
        self._meter.calls += 1
        self._meter.charge(VIEW, kind, list(rows), work, keys, [1] * len(rows))
        number = next(self._vlm.model.parameters()).element_size()
        geometry = self._vlm.geometry
        per_layer = kv_bytes_per_token(geometry, number) // geometry.num_layers
        kept = sum(map(sum, self._lengths))
        kept += geometry.num_layers * sum(self._num_fed)
        self._meter.kv_bytes = max(self._meter.kv_bytes, per_layer * kept)

    def cost(self, seconds_prefill: float, seconds_decode: float) -> Cost:
        """What all of it cost, beside the same response without stages."""
        meter, geometry = self._meter, self._vlm.geometry
        baseline = [
            geometry.num_layers * layer_flops(geometry, _causal(prompt.length))
            + sum(forward_flops(geometry, 1, prompt.length + t) for t in range(1, fed + 1))
            for prompt, fed in zip(self._attachment.given, self._num_fed, strict=True)
        ]
        forwards = tuple(1 + fed for fed in self._num_fed)
        prompts = self._attachment.prompts
        evicted = self._evicted
        layer_visual = tuple(
            tuple(n - prompt.length + prompt.num_visual for n in self._lengths[row])
            if evicted is None
            else evicted.num_visual[row]
            for row, prompt in enumerate(prompts)
        )
        has_layers = self._attachment.acts_between_layers or evicted is not None
        return Cost(
            flops=meter.flops,
            head_flops=meter.head_flops,
            vision_flops=self._vlm.architecture.encoder_flops(self._inputs),
            baseline_flops=sum(baseline),
            calls=meter.calls,
            forwards=dict(meter.forwards),
            baseline_forwards=sum(forwards),
            kv_bytes=meter.kv_bytes,
            prompt_lengths=tuple(prompt.length for prompt in prompts),
            visual_tokens=tuple(prompt.num_visual for prompt in prompts),
            seconds_prefill=seconds_prefill,
            seconds_decode=seconds_decode,
            row_flops=tuple(meter.row_flops),
            row_baseline_flops=tuple(baseline),
            row_baseline_forwards=forwards,
            row_forwards=tuple(dict(counts) for counts in meter.row_forwards),
            row_view_flops=tuple(dict(flops) for flops in meter.row_view_flops),
            kept_visual_tokens=tuple(counts[-1] for counts in layer_visual),
            layer_visual_tokens=layer_visual if has_layers else (),
        )


def _causal(length: int, num_scores: int = 0) -> Work:
    """What a layer does in the prefill of `length` positions, and stages behind it."""
    return Work(length, length * (length + 1) // 2, scores=num_scores)
