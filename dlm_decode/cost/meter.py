"""What a response cost, charged forward by forward as it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlm_decode.cost.flops import Geometry, Work, attention_row_flops, head_flops, layer_flops
from dlm_decode.errors import InvalidInputError

__all__ = ["Cost", "CostMeter", "Forward", "Routing"]


@dataclass(frozen=True)
class Forward:
    """One run of the language model, charged per row by its real (unpadded) length.

    Attributes:
        view: `"FULL"`, `"TEXT_ONLY"`, ... as named by the view that ran.
        kind: `"full"` (every position computed), or what a cache policy names it: `"suffix"`,
            `"block"`, `"window"`, `"partial"`. Of autoregressive models `"prefill"` and `"decode"`.
        rows: batch rows that took part.
        queries: positions computed, per entry of `rows`; where layers differ, in the one that
            computes the most.
        keys: positions that can be attended to, per entry of `rows`.
        head_positions: positions given to the language-model head, per entry of `rows`.
        flops: FLOPs of the decoder layers, summed over `rows`.
        head_flops: FLOPs of the head, summed over `rows`.
        attention_rows: queries whose attention a stage asked for, per entry of `rows`; empty where
            none did.
    """

    view: str
    kind: str
    rows: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    head_positions: tuple[int, ...]
    flops: int
    head_flops: int
    attention_rows: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The trajectory's form of this forward; `attention_rows` only where a stage asked."""
        asked = {"attention_rows": list(self.attention_rows)} if self.attention_rows else {}
        return {
            "view": self.view,
            "kind": self.kind,
            "rows": list(self.rows),
            "queries": list(self.queries),
            "keys": list(self.keys),
            "head_positions": list(self.head_positions),
            "flops": self.flops,
            "head_flops": self.head_flops,
            **asked,
        }


@dataclass(frozen=True)
class Routing:
    """What one response's forwards add up to, relative to the baseline's T forwards.

    Attributes:
        f: forwards with visual tokens / T.
        sigma: forwards without them / T. A response's first step has none, and neither has a step
            that a sampler decides without looking.
        pi: mean cost of a forward with visual tokens / an unpruned one's; 1 without a vision stage.
        rho: mean cost of a forward without visual tokens / an unpruned one's.

    Source: LOWN (arXiv 2610.36671), relative cost.
    """

    f: float
    sigma: float
    pi: float
    rho: float

    @property
    def relative(self) -> float:
        """`pi * f + sigma * rho`."""
        return self.pi * self.f + self.sigma * self.rho


@dataclass(frozen=True)
class Cost:
    """What a `generate` call cost.

    Attributes:
        flops: decoder layers, all rows and forwards.
        head_flops: language-model head.
        vision_flops: tower and projector, once per response.
        baseline_flops: decoder layers of the baseline sampler with the same settings and no stage,
            run to its last step (no early stop). Of autoregressive models, those of the same tokens
            without stages.
        calls: model calls; a batched call counts once.
        forwards: row forwards by `(view, kind)`.
        baseline_forwards: row forwards that `baseline_flops` counts (FULL view).
        kv_bytes: most bytes of keys and values kept between forwards.
        prompt_lengths: P per row, as it enters the language model.
        visual_tokens: visual tokens that enter the language model, per row.
        seconds_prefill: from the call to the first step (vision encoder, prompt).
        seconds_decode: the steps.
        row_flops: decoder FLOPs per row.
        row_baseline_flops: `baseline_flops` per row.
        row_baseline_forwards: `baseline_forwards` per row.
        row_forwards: forwards of each row by view.
        row_view_flops: decoder FLOPs of each row by view.
        kept_visual_tokens: visual tokens per row that were still read when the response was done;
            fewer than `visual_tokens` where a stage pruned in between. With stages between layers,
            those that the last layer reads; with one that shortens the cache, those left in it.
        layer_visual_tokens: visual tokens that each layer read in the newest forward with them, per
            row; empty without stages between layers or on the cache.
    """

    flops: int
    head_flops: int
    vision_flops: int
    baseline_flops: int
    calls: int
    forwards: dict[tuple[str, str], int]
    baseline_forwards: int
    kv_bytes: int
    prompt_lengths: tuple[int, ...]
    visual_tokens: tuple[int, ...]
    seconds_prefill: float
    seconds_decode: float
    row_flops: tuple[int, ...] = ()
    row_baseline_flops: tuple[int, ...] = ()
    row_baseline_forwards: tuple[int, ...] = ()
    row_forwards: tuple[dict[str, int], ...] = ()
    row_view_flops: tuple[dict[str, int], ...] = ()
    kept_visual_tokens: tuple[int, ...] = ()
    layer_visual_tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def relative(self) -> float:
        """Decoder FLOPs relative to the baseline sampler with the same settings."""
        return self.flops / self.baseline_flops if self.baseline_flops else 0.0

    def routing(self, row: int = 0) -> Routing:
        """How often a row looked at its visual tokens, and what it paid for it.

        Raises:
            InvalidInputError: with classifier-free guidance, whose second forwards belong to
                neither view.
        """
        counts, flops = self.row_forwards[row], self.row_view_flops[row]
        if "UNCONDITIONAL" in counts:
            raise InvalidInputError("routing shares are not defined with cfg_scale above 0.")
        total, scheduled = self.row_baseline_flops[row], self.row_baseline_forwards[row]

        def mean_cost(view: str) -> float:
            is_run = counts.get(view) and total
            return flops[view] / counts[view] * scheduled / total if is_run else 0.0

        return Routing(
            f=counts.get("FULL", 0) / max(1, scheduled),
            sigma=counts.get("TEXT_ONLY", 0) / max(1, scheduled),
            pi=mean_cost("FULL"),
            rho=mean_cost("TEXT_ONLY"),
        )

    @property
    def num_forwards(self) -> int:
        """Row forwards of every view and kind together."""
        return sum(self.forwards.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; forwards are keyed `"VIEW/kind"`."""
        return {
            "flops": self.flops,
            "head_flops": self.head_flops,
            "vision_flops": self.vision_flops,
            "baseline_flops": self.baseline_flops,
            "relative": self.relative,
            "calls": self.calls,
            "forwards": {f"{view}/{kind}": n for (view, kind), n in self.forwards.items()},
            "baseline_forwards": self.baseline_forwards,
            "kv_bytes": self.kv_bytes,
            "prompt_lengths": list(self.prompt_lengths),
            "visual_tokens": list(self.visual_tokens),
            "kept_visual_tokens": list(self.kept_visual_tokens),
            **(
                {"layer_visual_tokens": [list(counts) for counts in self.layer_visual_tokens]}
                if self.layer_visual_tokens
                else {}
            ),
            "seconds_prefill": self.seconds_prefill,
            "seconds_decode": self.seconds_decode,
            "rows": [self._row(row) for row in range(len(self.row_flops))],
        }

    def _row(self, row: int) -> dict[str, Any]:
        counts = self.row_forwards[row]
        shares = None
        if "UNCONDITIONAL" not in counts:
            routing = self.routing(row)
            shares = {**vars(routing), "relative": routing.relative}
        return {
            "flops": self.row_flops[row],
            "baseline_flops": self.row_baseline_flops[row],
            "forwards": dict(counts),
            "routing": shares,
        }

    def summary(self) -> str:
        """One line for a terminal."""
        kinds = ", ".join(f"{n} {view} {kind}" for (view, kind), n in self.forwards.items())
        saved = self.baseline_forwards - self.num_forwards
        note = f" ({saved} fewer than the schedule)" if saved > 0 else ""
        kept, entered = sum(self.kept_visual_tokens), sum(self.visual_tokens)
        pruned = f"{kept} of {entered} visual tokens kept; " if kept < entered else ""
        return (
            f"{self.num_forwards} forwards{note}: {kinds or 'none'}; "
            f"{self.flops / 1e9:.3g} GFLOPs in the decoder ({self.relative:.3f} of baseline), "
            f"{self.head_flops / 1e9:.3g} in the head, "
            f"{self.vision_flops / 1e9:.3g} in the vision encoder; "
            f"{pruned}{self.seconds_prefill:.2f} s prefill, {self.seconds_decode:.2f} s decode"
        )


@dataclass
class CostMeter:
    """Charges every forward as it runs.

    Args:
        geometry: sizes of the model that is charged.
        num_rows: B.
    """

    geometry: Geometry
    num_rows: int
    calls: int = 0
    flops: int = 0
    head_flops: int = 0
    kv_bytes: int = 0
    forwards: Counter[tuple[str, str]] = field(default_factory=Counter)
    row_flops: list[int] = field(default_factory=list)
    row_forwards: list[Counter[str]] = field(default_factory=list)
    row_view_flops: list[Counter[str]] = field(default_factory=list)
    pending: list[Forward] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.row_flops = [0] * self.num_rows
        self.row_forwards = [Counter() for _ in range(self.num_rows)]
        self.row_view_flops = [Counter() for _ in range(self.num_rows)]

    def charge(
        self,
        view: str,
        kind: str,
        rows: Sequence[int],
        work: Sequence[Sequence[Work]],
        keys: Sequence[int],
        head_positions: Sequence[int],
        attention_rows: Sequence[int] = (),
        asked_layers: int = 0,
    ) -> None:
        """Adds one view's share of a model call.

        Args:
            view: as in `Forward`.
            kind: as in `Forward`.
            rows: batch rows that took part; the other arguments are per entry.
            work: what each layer did.
            keys: positions that can be attended to.
            head_positions: positions given to the head.
            attention_rows: queries whose attention was asked for in `asked_layers` layers.
            asked_layers: see there.
        """
        per_row = [
            sum(count * layer_flops(self.geometry, same) for same, count in Counter(layers).items())
            for layers in work
        ]
        for entry, count in enumerate(attention_rows):
            per_row[entry] += attention_row_flops(self.geometry, count, keys[entry], asked_layers)
        for row, flops in zip(rows, per_row, strict=True):
            self.row_flops[row] += flops
            self.row_forwards[row][view] += 1
            self.row_view_flops[row][view] += flops
        forward = Forward(
            view=view,
            kind=kind,
            rows=tuple(rows),
            queries=tuple(max(layer.queries for layer in layers) for layers in work),
            keys=tuple(keys),
            head_positions=tuple(head_positions),
            flops=sum(per_row),
            head_flops=head_flops(self.geometry, sum(head_positions)),
            attention_rows=tuple(attention_rows),
        )
        self.flops += forward.flops
        self.head_flops += forward.head_flops
        self.forwards[view, kind] += len(rows)
        self.pending.append(forward)

    def take_pending(self) -> list[Forward]:
        """Forwards charged since the last call, for the trajectory's current step."""
        taken, self.pending = self.pending, []
        return taken
