"""The decode loop, one for every model and sampler.

It is the only place that steps, commits, stops and records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlm_decode.canvas import Canvas
from dlm_decode.confidence import select_top
from dlm_decode.errors import DlmError, NumericalError
from dlm_decode.predictor import FULL, Predictor, View
from dlm_decode.quota import QuotaSchedule
from dlm_decode.record import StepRecord
from dlm_decode.samplers.base import Sampler, Step, StepContext
from dlm_decode.schedule import BlockSchedule
from dlm_decode.settings import Quirks, Settings
from dlm_decode.stops import update_stop_position

__all__ = ["decode"]


@torch.no_grad()
def decode(
    predictor: Predictor,
    sampler: Sampler,
    settings: Settings,
    *,
    stops: Sequence[Sequence[int]] = (),
    last: tuple[int, ...] = (),
    on_step: Callable[[StepRecord], None] | None = None,
    probes: Sequence[View] = (),
) -> None:
    """Fills `predictor.canvas`.

    Rows advance on their own: each has its block, its step in the block and its stop, so a row's
    tokens do not depend on its neighbours, and a finished row takes no further part. The host reads
    the device once per step here, and once in each forward, whatever the number of rows.

    Args:
        predictor: holds the model, the prompts and the canvas.
        sampler: decides each step.
        settings: schedule, preset.
        stops: stop sequences as ids.
        last: ids that are committed only when nothing else is left.
        on_step: called with every step's record.
        probes: views whose predictions are recorded at the start of every step, without a say in
            it and without a charge.

    Raises:
        NumericalError: the model returned NaN.
        DlmError: the sampler committed outside the eligible positions, or the mask id.
    """
    canvas, quirks = predictor.canvas, settings.quirks
    mask_id = predictor.model.special_ids.mask
    progress = _Progress.create(settings, canvas)
    is_first = quirks.commits_first_from_prompt and predictor.knows_first
    is_first = is_first and bool(canvas.is_open[:, canvas.lead].any())
    state = sampler.start(predictor)
    broken = torch.zeros((), dtype=torch.bool, device=canvas.tokens.device)
    update_stop_position(canvas, stops, quirks.stop_rule)
    step_index = 0
    began = time.perf_counter()
    while True:
        eligible = progress.advance(canvas)
        is_first = is_first and step_index == 0
        if is_first:
            eligible = eligible & _only(canvas.lead, canvas)
        flags = torch.stack([eligible.any(), predictor.has_nan, broken]).long()
        is_active, has_nan, is_broken, *places = torch.cat([flags, *progress.places]).tolist()
        if has_nan:
            raise NumericalError(
                f"the model returned NaN at step {step_index - 1}; "
                "try dtype=float32 or bfloat16, and check the weights."
            )
        if is_broken:
            raise DlmError(
                f"sampler {getattr(sampler, 'name', sampler)!r} committed "
                "outside the eligible positions, or the mask id."
            )
        if not is_active:
            return
        quota, share = progress.quota(places)
        context = StepContext(
            tokens=canvas.tokens,
            is_open=canvas.is_open,
            eligible=eligible,
            quota=quota,
            share=share,
            block=progress.block,
            step_in_block=progress.step,
            step=step_index,
            last=last,
            predictor=predictor,
        )
        active = eligible.any(dim=1, keepdim=True)
        probed = {
            view.name: predictor(view, canvas.is_wanted & active, is_charged=False)
            for view in probes
        }
        step = _greedy(context) if is_first else sampler.step(context, state)
        step, forced = _at_least_one(step, eligible, quirks)
        broken |= (step.commit & ~eligible).any()
        if not quirks.may_predict_mask:
            broken |= (step.commit & (step.tokens == mask_id)).any()
        canvas.tokens = torch.where(step.commit, step.tokens, canvas.tokens)
        canvas.is_open = canvas.is_open & ~(step.commit & (step.tokens != mask_id))
        progress.step = progress.step + 1
        if is_first:  # it is no step of the schedule
            progress = _Progress.create(settings, canvas)
        update_stop_position(canvas, stops, quirks.stop_rule)
        prunings = predictor.end_step()
        if on_step is not None:
            now = time.perf_counter()
            seconds = now - began
            on_step(
                StepRecord.create(
                    step_index, seconds, context, step, forced, canvas, probed, prunings
                )
            )
            began = time.perf_counter()  # what `on_step` took is no part of the next step
        step_index += 1


def _only(column: int, canvas: Canvas) -> Tensor:
    """`(C,)` bool, true at one column."""
    return torch.arange(canvas.width, device=canvas.tokens.device) == column


def _greedy(context: StepContext) -> Step:
    """Commits the argmax at every eligible position."""
    draft = context.predict(FULL, context.eligible, samples=False)
    commit = context.eligible
    return Step(commit=commit, tokens=draft.tokens, draft=draft, reasons={"prompt": commit})


def _at_least_one(step: Step, eligible: Tensor, quirks: Quirks) -> tuple[Step, Tensor]:
    """The step with at least one commit per unfinished row, and `(B, C)` where that was forced.

    A row that commits nothing gets the draft's best position.
    """
    idle = eligible.any(dim=1) & ~step.commit.any(dim=1)
    if quirks.blocks_end_after_steps:
        idle = torch.zeros_like(idle)
    forced = select_top(step.draft.log_prob, eligible, idle.long())
    confidence = step.draft.confidence if step.confidence is None else step.confidence
    step = replace(
        step,
        commit=step.commit | forced,
        tokens=torch.where(forced, step.draft.tokens, step.tokens),
        confidence=torch.where(forced, step.draft.confidence, confidence),
    )
    return step, forced


@dataclass
class _Progress:
    """Each row's place in the schedule; tensors are `(B,)` unless stated."""

    block: Tensor
    step: Tensor
    num_open: Tensor
    num_left: Tensor
    starts: Tensor  # (blocks,)
    ends: Tensor  # (blocks,)
    steps: Tensor  # (blocks,)
    quotas: QuotaSchedule
    counts: dict[tuple[int, int], tuple[int, ...]]  # by open positions and steps of a block
    membership: Tensor  # (T, blocks)
    schedule: BlockSchedule
    quirks: Quirks

    @classmethod
    def create(cls, settings: Settings, canvas: Canvas) -> _Progress:
        schedule = settings.blocks
        device, num_rows = canvas.tokens.device, canvas.tokens.shape[0]
        starts, ends = torch.tensor(schedule.bounds, device=device).T
        positions = torch.arange(schedule.gen_length, device=device)[:, None]
        zeros = torch.zeros(num_rows, dtype=torch.long, device=device)
        return cls(
            block=zeros - 1,
            step=zeros,
            num_open=zeros,
            num_left=zeros,
            starts=starts + canvas.lead,
            ends=ends + canvas.lead,
            steps=torch.tensor(schedule.steps_per_block, device=device),
            quotas=settings.quotas,
            counts={},
            membership=((positions >= starts) & (positions < ends)).float(),
            schedule=schedule,
            quirks=settings.quirks,
        )

    def advance(self, canvas: Canvas) -> Tensor:
        """Moves rows whose block is done to the next one with open positions.

        Returns:
            `(B, C)` bool, the eligible positions.
        """
        open_per_block = (canvas.is_open[:, canvas.lead :].float() @ self.membership).long()
        blocks = torch.arange(len(self.steps), device=self.block.device)
        current = self.block.clamp_min(0)
        earliest = self.block
        if self.quirks.blocks_end_after_steps:
            is_spent = (self.block >= 0) & (self.step >= self.steps[current])
            earliest = torch.where(is_spent, self.block + 1, self.block)
        candidates = (open_per_block > 0) & (blocks >= earliest[:, None])
        has_block = candidates.any(dim=1)
        block = torch.where(has_block, candidates.to(torch.int8).argmax(dim=1), current)
        is_waiting = torch.zeros_like(has_block)
        if self.quirks.rows_share_blocks:
            lowest = torch.where(has_block, block, len(self.steps)).min()
            is_waiting = has_block & (block > lowest)
            block = torch.where(is_waiting, current, block)
        self.num_left = open_per_block.gather(1, block[:, None])[:, 0]
        is_new = has_block & ~is_waiting & (block != self.block)
        self.num_open = torch.where(
            is_new, open_per_block.gather(1, block[:, None])[:, 0], self.num_open
        )
        self.step = torch.where(is_new, 0, self.step)
        self.block = torch.where(has_block & ~is_waiting, block, self.block)

        columns = torch.arange(canvas.width, device=block.device)
        stop = canvas.stop_position
        is_stopped = stop < canvas.width
        limit = self.ends[block]
        if self.quirks.stop_rule == "listed":
            limit = torch.where(is_stopped, stop, limit)
        else:
            limit = torch.minimum(limit, stop)
        is_running = has_block & ~is_waiting & ~(is_stopped & (stop <= self.starts[block]))
        return canvas.is_open & (columns < limit[:, None]) & is_running[:, None]

    @property
    def places(self) -> tuple[Tensor, ...]:
        """What `quota` needs to know on the host."""
        return self.block, self.step, self.num_open, self.num_left

    def quota(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What the schedule says now: `(B,)` counts, and shares of the open positions.

        Counts are at least 1. Programs that let a step pass have 0 where the schedule does, and
        once its steps are over. From a block's last step on the share is 1.
        """
        counts, shares = [], []
        for row in range(len(self.block)):
            block, step, num_open, num_left = places[row :: len(self.block)]
            counts.append(self._quota_of_row(block, step, num_open, num_left))
            shares.append(self._share_of_row(block, step, num_left, counts[-1]))
        both = torch.tensor([counts, shares], dtype=torch.float64).to(self.block.device)
        least = int(not self.quirks.blocks_end_after_steps)
        return both[0].long().clamp_min(least), both[1].float()

    def _quota_of_row(self, block: int, step: int, num_open: int, num_left: int) -> int:
        if block < 0:
            return 0
        steps = self.schedule.steps_per_block[block]
        count_now = getattr(self.quotas, "count_now", None)
        if count_now is not None:
            return count_now(num_left, step, steps) if step < steps else 0
        if (num_open, steps) not in self.counts:
            self.counts[num_open, steps] = self.quotas.counts(num_open, steps)
        counts = self.counts[num_open, steps]
        return counts[step] if step < len(counts) else 0

    def _share_of_row(self, block: int, step: int, num_left: int, count: int) -> float:
        steps = self.schedule.steps_per_block[max(block, 0)]
        if step >= steps - 1:
            return 1.0
        share_now = getattr(self.quotas, "share_now", None)
        if share_now is not None:
            return share_now(step, steps)
        return min(1.0, count / num_left) if num_left else 0.0
