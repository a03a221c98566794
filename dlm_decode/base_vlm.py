"""What every vision-language model here has in common: names, texts, records, and its output."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.canvas import Canvas, Prompt
from dlm_decode.cost import Cost, Geometry
from dlm_decode.errors import InvalidInputError
from dlm_decode.given import GivenIds
from dlm_decode.models.special_ids import SpecialIds
from dlm_decode.record import StepRecord, Trajectory
from dlm_decode.registry import describe
from dlm_decode.settings import Settings
from dlm_decode.track import Tracker

if TYPE_CHECKING:
    from dlm_decode.models.text import TextCodec

__all__ = ["BaseVlm", "Output", "Stop", "check_used", "synchronize"]

Stop = str | int | Sequence[int]
"""One stop: a text, an id, or a sequence of ids."""


@dataclass(frozen=True)
class Output:
    """What `generate` returns.

    Attributes:
        text: the answer, or a list of answers for a batch; `None` without a tokenizer.
        sequences: `(B, T')` ids of the response, cut at the stop, then the suffix; rows are padded
            on the right.
        trajectory: every step.
        cost: FLOPs, forwards, seconds.
        stop_positions: response position of each row's stop sequence, `None` where none was found.
    """

    text: str | list[str] | None
    sequences: Tensor
    trajectory: Trajectory
    cost: Cost
    stop_positions: tuple[int | None, ...]


class BaseVlm:
    """A model with its tokenizer and image processing.

    Args:
        model: a `PreTrainedModel`.
        processor: tokenizer and image processing; without it only the low-level entries work.
        name: for records.
        geometry: sizes for the cost model.
        special_ids: of the model.
    """

    own_sampler: ClassVar[str]
    """What `generate` decodes with where nothing is said."""

    def __init__(
        self,
        model: Any,
        processor: TextCodec | None,
        *,
        name: str,
        geometry: Geometry,
        special_ids: SpecialIds,
    ) -> None:
        self.model: Any = model.eval()
        self.geometry = geometry
        self.special_ids = special_ids
        self.processor: Any = processor
        self.name = name or type(model).__name__

    @property
    def device(self) -> torch.device:
        """Where prompts and responses live: with the input embeddings."""
        return self.model.get_input_embeddings().weight.device

    @property
    def fingerprint(self) -> str:
        """Short hash of some numbers of every weight, to tell two trainings of a model apart."""
        digest = hashlib.sha256()
        for name, weight in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(weight.flatten()[:64].float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def token_text(self, token: int) -> str:
        """Text of one id; `<id>` without a tokenizer."""
        if self.processor is None or token < 0:
            return f"<{token}>"
        return self.processor.token_text(token)

    def decode_text(self, ids: Sequence[int]) -> str:
        """Text of a response; the ids without a tokenizer."""
        if self.processor is None:
            return " ".join(map(str, ids))
        unwritten = self.special_ids.unwritten
        return self.processor.decode([token for token in ids if token not in unwritten])

    def check_sampler(self, sampler: Any) -> None:
        """Raises `InvalidInputError` for a sampler that cannot decode the model."""
        raise NotImplementedError(f"{type(self).__name__} must know its samplers")

    @property
    def _given(self) -> GivenIds:
        return GivenIds(
            self.processor,
            self.special_ids,
            self.geometry.vocab_size,
            getattr(self.model, "num_valid_tokens", None),
            self.name,
        )

    def _generators(self, settings: Settings, num_rows: int) -> list[torch.Generator]:
        seeds = settings.seed if isinstance(settings.seed, tuple) else (settings.seed,) * num_rows
        if len(seeds) != num_rows:
            raise InvalidInputError(
                f"seed has {len(seeds)} entries for {num_rows} rows; "
                "give one number or one per row."
            )
        return [torch.Generator(self.device).manual_seed(seed) for seed in seeds]

    def _check_length(
        self, row: int, length: int, num_visual: int, settings: Settings, num_suffix: int = 0
    ) -> None:
        """Raises `InvalidInputError` where a prompt with its response is longer than allowed."""
        names = ("max_position_embeddings", "tokenizer_model_max_length")
        config = self.model.config
        limits = [
            getattr(part, name, None)
            for part in (config, getattr(config, "text_config", None))
            for name in names
        ]
        limit = min((value for value in limits if value is not None), default=None)
        total = length + settings.gen_length + num_suffix
        if limit is not None and total > limit:
            raise InvalidInputError(
                f"prompt {row} has {length} positions ({num_visual} visual); "
                f"with gen_length {settings.gen_length} and a suffix of {num_suffix} "
                f"that is {total}, and the model reads at most {limit}; "
                "shorten the prompt, use fewer or smaller images, fewer frames (max_frames), "
                "or a smaller gen_length."
            )

    def _run_record(
        self,
        sampler: Any,
        stages: Sequence[Any],
        settings: Mapping[str, Any],
        questions: Sequence[tuple[str | None, Sequence[dict[str, Any]]]],
        prompts: Sequence[Prompt],
    ) -> dict[str, Any]:
        """The `run` line's common part; `questions` are each row's text and videos."""
        import transformers

        try:
            own_version = version("dlm-decode")
        except PackageNotFoundError:
            own_version = "uninstalled"
        return {
            "type": "run",
            "version": own_version,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": self.name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attn_implementation": self.model.config._attn_implementation,
            "sampler": describe(sampler),
            "stages": [describe(stage) for stage in stages],
            "settings": dict(settings),
            "mask_token_id": self.special_ids.mask,
            "padding_ids": list(self.special_ids.padding),
            "rows": [
                {
                    "prompt_length": prompt.length,
                    "visual_tokens": prompt.num_visual,
                    "question": question,
                    "videos": list(videos),
                }
                for (question, videos), prompt in zip(questions, prompts, strict=True)
            ],
        }

    def _start(
        self,
        trajectory: Trajectory,
        tracker: Tracker | None,
        streamer: Any,
        prompt: Prompt,
        canvas: Canvas,
    ) -> Callable[[StepRecord], None]:
        """Tells tracker and streamer about the run; what is returned tells all about a step."""
        if tracker is not None:
            tracker.start(trajectory.run)
        if streamer is not None:
            streamer.put(prompt.ids[~prompt.is_visual].cpu())

        def on_step(record: StepRecord) -> None:
            trajectory.steps.append(record)
            if tracker is not None:
                tracker.step(record.to_dict(self.token_text))
            if streamer is not None:
                streamer.put_draft(canvas.tokens[0, canvas.lead :].cpu())

        return on_step

    def _output(
        self,
        canvas: Canvas,
        suffix_ids: tuple[int, ...] | None,
        is_batch: bool,
        trajectory: Trajectory,
        cost: Cost,
        tracker: Tracker | None,
        streamer: Any,
    ) -> Output:
        width = canvas.width - canvas.lead
        stops = (canvas.stop_position - canvas.lead).tolist()
        responses = [
            [*row[:stop], *(suffix_ids or ())]
            for row, stop in zip(canvas.tokens[:, canvas.lead :].tolist(), stops, strict=True)
        ]
        special = self.special_ids
        filler = special.pad if special.pad is not None else special.eos
        longest = max(map(len, responses))
        sequences = torch.full(
            (len(responses), longest), -1 if filler is None else filler, dtype=torch.long
        )
        for row, response in enumerate(responses):
            sequences[row, : len(response)] = torch.tensor(response, dtype=torch.long)
        texts = (
            None
            if self.processor is None
            else [self.decode_text(response) for response in responses]
        )
        positions = tuple(stop if stop < width else None for stop in stops)
        trajectory.end = {
            "type": "end",
            "rows": [
                {
                    "tokens": response,
                    "text": None if texts is None else texts[row],
                    "stop_position": positions[row],
                }
                for row, response in enumerate(responses)
            ],
            "cost": cost.to_dict(),
        }
        if tracker is not None:
            tracker.finish(trajectory.end)
        if streamer is not None:
            streamer.put(sequences[0])
            streamer.end()
        text = texts if texts is None or is_batch else texts[0]
        return Output(text, sequences.to(self.device), trajectory, cost, positions)


def check_used(options: dict[str, Any], value: Any, name: str) -> None:
    """Raises `InvalidInputError` for options that go with an argument that is not there."""
    is_there = value is not None and (not isinstance(value, (list, tuple)) or len(value) > 0)
    given = [key for key, option in options.items() if option is not None]
    if given and not is_there:
        raise InvalidInputError(
            f"{', '.join(given)} {'goes' if len(given) == 1 else 'go'} with {name}=, and there is "
            f"none; pass {name}=, or leave {'it' if len(given) == 1 else 'them'} out."
        )


def synchronize(device: torch.device) -> None:
    """Waits for queued work, so that prefill seconds are not booked on the first step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
