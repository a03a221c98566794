"""What a stage that prunes by attention is waiting for, during one `generate` call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dlm_decode.canvas import Canvas, Prompt
from dlm_decode.models.attention import RowProbe
from dlm_decode.vision.base import AttentionRequest, AttentionStage, keep_positions

__all__ = ["Pruning", "Watch"]


@dataclass(frozen=True)
class Pruning:
    """One row's loss of visual tokens.

    Attributes:
        row: batch row.
        prompt: what is left of its prompt.
        kept: `(K,)` which visual tokens stay, counted from 0 among the row's visual tokens,
            ascending.
    """

    row: int
    prompt: Prompt
    kept: Tensor


class Watch:
    """Collects the attention rows of each row's first forward with visual tokens, then prunes.

    Args:
        stage: says what is kept.
        request: what the stage asks for.
        prompts: one per row.
    """

    def __init__(
        self, stage: AttentionStage, request: AttentionRequest, prompts: Sequence[Prompt]
    ) -> None:
        self.request = request
        self._stage, self._prompts = stage, prompts
        self._waiting = {row for row, prompt in enumerate(prompts) if prompt.num_visual}
        # By row: canvas columns of the asked queries (Q,).
        self._asked: dict[int, Tensor] = {}
        # By row: those, and what they attend to (Q, P).
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any row is yet to be pruned."""
        return bool(self._waiting)

    def waits_for(self, row: int) -> bool:
        """Whether the row's next forward with visual tokens is the one to observe."""
        return row in self._waiting and row not in self._seen

    @staticmethod
    def queries(canvas: Canvas, row: int) -> Tensor:
        """`(Q,)` canvas columns of the masked response positions; reads the device."""
        return canvas.is_open[row, canvas.lead :].nonzero()[:, 0] + canvas.lead

    def probe(
        self,
        rows: Sequence[int],
        canvas: Canvas,
        first_fed: int,
        canvas_start: int,
        key_mask: Tensor | None,
    ) -> RowProbe | None:
        """Observes one forward.

        Args:
            rows: batch rows of the forward.
            canvas: read for masked positions.
            first_fed: sequence column of the first fed position.
            canvas_start: sequence column of the first canvas position.
            key_mask: `(R, K)` bool, `True` at real keys.

        Returns:
            `None` where no row of the forward is waited for.
        """
        asked = {row: self.queries(canvas, row) for row in rows if self.waits_for(row)}
        self._asked = {row: columns for row, columns in asked.items() if len(columns)}
        if not self._asked:
            return None
        columns = pad_sequence(list(self._asked.values()), batch_first=True)
        return RowProbe(
            rows=columns.new_tensor([rows.index(row) for row in self._asked]),
            columns=columns + canvas_start - first_fed,
            num_keys=canvas_start,
            key_mask=key_mask,
            layers=self.request.layers,
        )

    def num_asked(self, row: int) -> int:
        """Attention rows that the last probe was asked for in a batch row."""
        return len(self._asked.get(row, ()))

    def take(self, probe: RowProbe) -> None:
        """Keeps what the last probe saw."""
        for (row, columns), attention in zip(self._asked.items(), probe.mean, strict=True):
            length = self._prompts[row].length
            seen = attention[: len(columns), attention.shape[1] - length :]
            self._seen[row] = (columns, seen)

    def settle(self, canvas: Canvas) -> list[Pruning]:
        """Prunes the rows that were observed in this step, after its commits."""
        prunings = []
        self._waiting -= self._seen.keys()
        for row, (columns, attention) in self._seen.items():
            is_masked = canvas.is_open[row, columns]
            prompt = self._prompts[row]
            if not bool(is_masked.any()):
                continue
            keep = self._stage.keep(prompt, attention[is_masked]) | ~prompt.is_visual
            if bool(keep.all()):
                continue
            kept = keep[prompt.is_visual].nonzero()[:, 0]
            pruned = keep_positions(prompt, keep, self._stage.positions)
            prunings.append(Pruning(row, pruned, kept))
        self._seen = {}
        return prunings
