"""The trajectory: every step of a response.

Steps stay on the device while decoding and become plain dicts afterwards. A trajectory file is
JSON lines: one `run` line, one `step` line per step, one `end` line; `Trajectory.records` says what
they hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm_decode.canvas import Canvas
from dlm_decode.cost import Forward
from dlm_decode.errors import InvalidInputError
from dlm_decode.predictor import Prediction
from dlm_decode.samplers.base import Step, StepContext
from dlm_decode.vision.watch import Pruning

__all__ = ["StepRecord", "Trajectory", "read_records"]

TokenText = Callable[[int], str]


@dataclass(frozen=True)
class StepRecord:
    """One step of a response.

    Tensors are `(B, C)` over canvas columns unless stated, and stay on the device until they are
    read.

    Attributes:
        index: step number, from 0.
        seconds: wall time of the step.
        forwards: forwards that ran in it.
        active: `(B,)` bool, rows that were not finished.
        block: `(B,)` block of each row.
        commit: positions committed.
        tokens: proposed tokens, read at `commit`.
        confidence: probability of the proposed tokens.
        draft: top proposals at open positions; -1 where there was none.
        draft_confidence: their probabilities.
        reasons: masks by reason.
        info: further `(B,)` tensors of the sampler.
        lead: canvas columns in front of the response.
        per_token: further `(B, C)` tensors of the sampler, read at `commit`.
        probes: what further views would have proposed, by name of the view.
        prunings: rows that lost visual tokens after this step.
    """

    index: int
    seconds: float
    forwards: tuple[Forward, ...]
    active: Tensor
    block: Tensor
    commit: Tensor
    tokens: Tensor
    confidence: Tensor
    draft: Tensor
    draft_confidence: Tensor
    reasons: dict[str, Tensor]
    info: dict[str, Tensor]
    lead: int
    per_token: dict[str, Tensor] = field(default_factory=dict)
    probes: dict[str, Prediction] = field(default_factory=dict)
    prunings: tuple[Pruning, ...] = ()

    @classmethod
    def create(
        cls,
        index: int,
        seconds: float,
        context: StepContext,
        step: Step,
        forced: Tensor,
        canvas: Canvas,
        probes: Mapping[str, Prediction],
        prunings: Sequence[Pruning] = (),
    ) -> StepRecord:
        """What the loop knows after a step.

        `forced` are commits that the loop added for an idle row.
        """
        asked = step.draft.log_prob > float("-inf")
        return cls(
            index=index,
            seconds=seconds,
            forwards=tuple(context.predictor.meter.take_pending()),
            active=context.eligible.any(dim=1),
            block=context.block,
            commit=step.commit,
            tokens=step.tokens,
            confidence=step.draft.confidence if step.confidence is None else step.confidence,
            draft=torch.where(asked & ~step.commit, step.draft.tokens, -1),
            draft_confidence=step.draft.confidence,
            reasons={"forced": forced, **step.reasons},
            info=dict(step.info),
            lead=canvas.lead,
            per_token=dict(step.per_token),
            probes=dict(probes),
            prunings=tuple(prunings),
        )

    def to_dict(self, text_of: TokenText | None = None) -> dict[str, Any]:
        """The `step` line; reads the device."""
        lead = self.lead
        commit, draft = self.commit.cpu(), self.draft.cpu()
        tokens, confidence = self.tokens.cpu(), self.confidence.cpu()
        draft_confidence = self.draft_confidence.cpu()
        reasons = {name: mask.cpu() for name, mask in self.reasons.items()}
        info = {name: value.cpu() for name, value in self.info.items()}
        per_token = {name: value.cpu() for name, value in self.per_token.items()}
        active, block = self.active.tolist(), self.block.tolist()
        probes = {
            name: (probe.tokens.cpu(), probe.confidence.cpu())
            for name, probe in self.probes.items()
        }

        def entry(row: int, column: int, ids: Tensor, probability: Tensor) -> list[Any]:
            token = int(ids[row, column])
            text = None if text_of is None else text_of(token)
            return [column - lead, token, text, round(float(probability[row, column]), 6)]

        kept = {pruning.row: pruning.kept.tolist() for pruning in self.prunings}
        rows = []
        for row in (index for index, is_active in enumerate(active) if is_active):
            commits = []
            for column in commit[row].nonzero()[:, 0].tolist():
                reason = next(
                    (name for name, mask in reasons.items() if mask[row, column]), "quota"
                )
                commits.append([*entry(row, column, tokens, confidence), reason])
            drafts = [
                entry(row, column, draft, draft_confidence)
                for column in (draft[row] >= 0).nonzero()[:, 0].tolist()
            ]
            views = {forward.view for forward in self.forwards if row in forward.rows} - {
                "UNCONDITIONAL"
            }
            rows.append(
                {
                    "row": row,
                    "block": block[row],
                    "route": "FULL" if "FULL" in views else next(iter(views), None),
                    "commits": commits,
                    "draft": drafts,
                    "info": {name: _finite(value[row].item()) for name, value in info.items()},
                }
            )
            if per_token:
                rows[-1]["per_token"] = {
                    name: [_finite(number) for number in value[row][commit[row]].tolist()]
                    for name, value in per_token.items()
                }
            if row in kept:
                rows[-1]["kept_visual"] = kept[row]
            if probes:
                rows[-1]["probes"] = {
                    name: [
                        entry(row, column, ids, probability)
                        for column in (probability[row] > 0).nonzero()[:, 0].tolist()
                    ]
                    for name, (ids, probability) in probes.items()
                }
        return {
            "type": "step",
            "step": self.index,
            "seconds": self.seconds,
            "forwards": [forward.to_dict() for forward in self.forwards],
            "rows": rows,
        }


def _finite(number: float) -> float | None:
    """The number, or `None` where JSON has no word for it."""
    return number if math.isfinite(number) else None


@dataclass
class Trajectory:
    """Every step of one `generate` call.

    Attributes:
        run: the `run` line: version, sampler, settings, model, rows.
        steps: step records, in order.
        end: the `end` line: tokens and text per row, cost. Empty while decoding.
        text_of: token id to text; `None` without a tokenizer.
    """

    run: dict[str, Any]
    steps: list[StepRecord] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    text_of: TokenText | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def records(self) -> Iterator[dict[str, Any]]:
        """JSON-ready dicts: `run`, the steps, `end`.

        A step has `step`, `seconds`, `forwards` and per active row `block`, `route`, `commits` as
        `[position, token, text, confidence, reason]`, `draft` as `[position, token, text,
        confidence]`, and `info`, with `None` for an infinite number. Where a sampler says more
        about its commits there is `per_token`, a list per name in the order of `commits`; where a
        stage pruned after the step, `kept_visual` lists the visual tokens that stay, counted from 0
        among the row's; where views were probed, `probes` has a list like `draft` per view.
        """
        yield self.run
        for step in self.steps:
            yield step.to_dict(self.text_of)
        if self.end:
            yield self.end

    def save(self, path: str | Path) -> Path:
        """Writes the records as JSON lines; missing parent folders are made."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for record in self.records():
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return path

    def commit_steps(self, row: int = 0) -> list[int | None]:
        """Step at which each response position of `row` was committed.

        It is `None` where the position never was.
        """
        width = self.steps[0].commit.shape[1] - self.steps[0].lead if self.steps else 0
        committed: list[int | None] = [None] * width
        for step in self.steps:
            for column in step.commit[row, step.lead :].nonzero()[:, 0].tolist():
                committed[column] = step.index
        return committed


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a trajectory file. A cut-off last line, as a killed run leaves it, is dropped.

    Raises:
        InvalidInputError: no such file, or not a trajectory.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidInputError(
            f"no trajectory file at {str(path)!r}; record one with --trajectory out.jsonl."
        )
    lines: Sequence[str] = (
        path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    )
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and records:
                break
            raise InvalidInputError(
                f"{str(path)!r} is not a trajectory: line {number} is not JSON ({error})."
            ) from None
        if not isinstance(record, dict) or record.get("type") not in ("run", "step", "end"):
            raise InvalidInputError(
                f"{str(path)!r} is not a trajectory: line {number} has no known 'type'."
            )
        records.append(record)
    if not records or records[0]["type"] != "run":
        raise InvalidInputError(
            f"{str(path)!r} is not a trajectory: it does not begin with a 'run' record."
        )
    return records
