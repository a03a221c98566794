"""`AutoregressiveVlm.generate`: left to right, through stock classes of transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlm_decode import samplers
from dlm_decode.autoregressive_inputs import Batch, batch_from_ids, batch_from_text
from dlm_decode.autoregressive_run import Response
from dlm_decode.base_vlm import BaseVlm, Output, Stop, check_used, synchronize
from dlm_decode.confidence import Proposal, drop_unlikely, propose
from dlm_decode.cost import CostMeter
from dlm_decode.errors import InvalidInputError, NumericalError
from dlm_decode.models.autoregressive import architecture_of
from dlm_decode.record import Trajectory
from dlm_decode.registry import describe
from dlm_decode.samplers.autoregressive import Autoregressive
from dlm_decode.settings import Settings, resolve_settings
from dlm_decode.stops import update_stop_position
from dlm_decode.track import abort, make_tracker
from dlm_decode.vision.attachment import attach, stages_for
from dlm_decode.vision.cache_stage import CacheStage
from dlm_decode.vision.eviction import Evictor

if TYPE_CHECKING:
    from dlm_decode.models.autoregressive.processing import AutoregressiveProcessor
    from dlm_decode.models.special_ids import SpecialIds
    from dlm_decode.vision.base import Stage

__all__ = ["AutoregressiveVlm", "check_options"]

DIFFUSION_ONLY = (
    *("cache", "steps", "block_length", "schedule", "steps_per_block", "step_ratio", "cfg_scale"),
    *("eos_last", "preset", "think_mode", "suffix", "prefill", "probe", "modalities"),
    "inputs_embeds",
)
"""Arguments of `DiffusionVlm.generate` that mean nothing here."""

_SETTINGS = (
    *("gen_length", "temperature", "top_k", "top_p", "seed", "max_frames", "fps", "force_sample"),
    *("frame_rate", "time_instruction"),
)


def check_options(sampler: Any, options: dict[str, Any]) -> Autoregressive:
    """The sampler, if it and the options make sense for an autoregressive model.

    Args:
        sampler: name, spec or instance; `None` for the only one.
        options: arguments of `DiffusionVlm.generate` that `AutoregressiveVlm.generate` has not.

    Raises:
        UnknownNameError: an unknown sampler.
        InvalidInputError: a sampler or an option of diffusion models, or an unknown argument.
    """
    chosen = Autoregressive() if sampler is None else samplers.make(sampler)
    if not isinstance(chosen, Autoregressive):
        raise InvalidInputError(
            f"sampler {describe(chosen)['name']!r} decodes diffusion models, and this model is "
            f"autoregressive; use sampler={Autoregressive.name!r}."
        )
    unknown = sorted(set(options) - set(DIFFUSION_ONLY))
    if unknown:
        raise InvalidInputError(f"generate has no argument {', '.join(unknown)}.")
    given = sorted(name for name, value in options.items() if value is not None)
    if given:
        raise InvalidInputError(
            f"{', '.join(given)}: for diffusion models only; an autoregressive model decodes one "
            "token after the other and keeps keys and values of all of them. Leave "
            f"{'it' if len(given) == 1 else 'them'} out."
        )
    return chosen


class AutoregressiveVlm(BaseVlm):
    """An autoregressive vision-language model, ready to be asked.

    Args:
        model: `...ForConditionalGeneration` of one of `dlm_decode.models.autoregressive.names()`.
        processor: tokenizer and image processing; without it only the low-level entry works.
        name: for records.
        special_ids: of the model; what its configs name by default.
        generation_defaults: the folder's `generation_config.json`. Of it `gen_length` and
            `max_new_tokens` are read; decoding is greedy unless the caller says otherwise.

    Raises:
        UnknownNameError: a model of another kind.
    """

    own_sampler = Autoregressive.name

    def __init__(
        self,
        model: Any,
        processor: AutoregressiveProcessor | None = None,
        *,
        name: str = "",
        special_ids: SpecialIds | None = None,
        generation_defaults: dict[str, Any] | None = None,
    ) -> None:
        from dlm_decode.models.autoregressive.loading import special_ids_of_stock

        self.architecture = architecture_of(model.config)
        super().__init__(
            model,
            processor,
            name=name,
            geometry=self.architecture.geometry,
            special_ids=special_ids or special_ids_of_stock(model),
        )
        given = generation_defaults or {}
        length = given.get("gen_length", given.get("max_new_tokens"))
        self.generation_defaults = {**self.architecture.default_settings, "gen_length": length}

    def check_sampler(self, sampler: Any) -> None:
        """Raises `InvalidInputError` for the samplers of diffusion models."""
        check_options(sampler, {})

    @torch.no_grad()
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        images: Any = None,
        videos: Any = None,
        *,
        sampler: Any = None,
        stages: Sequence[Stage | str] | Stage | str | None = (),
        gen_length: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        max_frames: int | None = None,
        fps: float | None = None,
        force_sample: bool | None = None,
        frame_rate: float | None = None,
        time_instruction: bool | None = None,
        stop: Sequence[Stop] | Stop | bool | None = None,
        suppress_token_ids: Sequence[int] = (),
        streamer: Any = None,
        track: Any = None,
        input_ids: Any = None,
        attention_mask: Any = None,
        pixel_values: Any = None,
        image_sizes: Any = None,
        image_grid_thw: Any = None,
        pixel_values_videos: Any = None,
        video_grid_thw: Any = None,
        second_per_grid_ts: Any = None,
        mm_token_type_ids: Any = None,
        **diffusion_only: Any,
    ) -> Output:
        """Answers one prompt or a batch.

        Exactly one of `prompt` and `input_ids` is given. Rows of a batch get the tokens that they
        would get alone. Greedy tokens are those of transformers' own `generate`.

        Args:
            prompt: the question, or a list of questions.
            images: an image or a list of images for one prompt (path, PIL image or array); one such
                entry per prompt for a batch.
            videos: likewise; a video is a file, a folder of frames, a list of images, or an array
                `(F, H, W, 3)`. A list of videos is a list of lists.
            sampler: `"autoregressive"`, the only one.
            stages: vision stages, in order; names, specs or instances.
            gen_length: tokens of the response at most.
            temperature: 0 is greedy.
            top_k: only that many likeliest tokens take part.
            top_p: only the likeliest tokens up to this probability take part.
            seed: one number (every row uses it), or one per row.
            max_frames: as in `DiffusionVlm.generate`, and so are the next four.
            fps: frames per second to take of a video.
            force_sample: take `max_frames` of every video at even distances.
            frame_rate: frames per second of folders, lists and arrays.
            time_instruction: tell the model how long each video is and where its frames lie.
            stop: stop strings, ids or id sequences, in addition to the model's own; `False` for no
                stop at all.
            suppress_token_ids: ids that are never proposed.
            streamer: object with `put`, `put_draft` and `end`; one row only.
            track: `"wandb"`, `"trackio"`, `"jsonl:PATH"`, a tracker, or a list of them.
            input_ids: `(B, S)` as a processor of transformers returns them, with a placeholder per
                visual token; `(S,)` for one row, a list of `(S,)` for unequal rows.
            attention_mask: `(B, S)`, 0 at padding, which is on the left.
            pixel_values: goes with `input_ids`, and so do the others below.
            image_sizes: `(height, width)` of each image (LLaVA-NeXT).
            image_grid_thw: `(n, 3)` patches in time, height and width (Qwen2.5-VL).
            pixel_values_videos: pixels of videos.
            video_grid_thw: as `image_grid_thw`.
            second_per_grid_ts: seconds per step in time, for each video.
            mm_token_type_ids: what transformers' processors add; the placeholders say the same.
            diffusion_only: arguments of `DiffusionVlm.generate` that mean nothing here; anything
                but `None` is refused.

        Returns:
            Output.

        Raises:
            InvalidInputError: arguments that cannot work, named with what is allowed.
            UnknownNameError: an unknown sampler, stage or option, with the nearest name.
            MediaError: an image or video that cannot be read.
            NumericalError: NaN logits.
        """
        began = time.perf_counter()
        chosen_sampler = check_options(sampler, diffusion_only)
        chosen_stages = stages_for(stages)
        evictor = Evictor(chosen_stages, self.geometry.num_layers)
        video_options = {
            "max_frames": max_frames,
            "fps": fps,
            "force_sample": force_sample,
            "frame_rate": frame_rate,
            "time_instruction": time_instruction,
        }
        settings = resolve_settings(
            {
                "gen_length": gen_length,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "seed": tuple(seed) if isinstance(seed, (list, tuple)) else seed,
                **video_options,
            },
            self.generation_defaults,
        )
        check_used(video_options, videos, "videos")
        stop_ids = self._given.stop_sequences(stop, settings)
        suppressed = self._given.suppressed(suppress_token_ids)
        tracker = make_tracker(track)
        batch = self._batch(
            prompt,
            images,
            videos,
            settings,
            input_ids,
            attention_mask,
            {
                "pixel_values": pixel_values,
                "image_sizes": image_sizes,
                "image_grid_thw": image_grid_thw,
                "pixel_values_videos": pixel_values_videos,
                "video_grid_thw": video_grid_thw,
                "second_per_grid_ts": second_per_grid_ts,
            },
            has_types=mm_token_type_ids is not None,
            is_timed=fps is not None,
        )
        num_rows = len(batch.inputs["input_ids"])
        if streamer is not None and num_rows > 1:
            raise InvalidInputError(
                f"a streamer shows one row, got {num_rows} prompts; drop it or pass one prompt."
            )
        self._check_lengths(batch, settings)
        generators = self._generators(settings, num_rows)
        meter = CostMeter(self.geometry, num_rows)
        attached = [stage for stage in chosen_stages if not isinstance(stage, CacheStage)]
        with attach(self.model, attached) as attachment:
            response = Response(self, attachment, evictor, meter, batch, settings.gen_length)
            began_prefill = time.perf_counter()
            logits = response.prefill()
            synchronize(self.device)
            prefilled = time.perf_counter()
            trajectory = Trajectory(
                run={
                    **self._run_record(
                        chosen_sampler,
                        chosen_stages,
                        {name: getattr(settings, name) for name in _SETTINGS},
                        batch.questions,
                        attachment.prompts,
                    ),
                    "stop_sequences": [list(stop) for stop in stop_ids],
                    "suppress_token_ids": suppressed,
                    "notes": [],
                },
                text_of=self.token_text,
            )
            canvas = response.canvas
            on_step = self._start(trajectory, tracker, streamer, attachment.prompts[0], canvas)
            suppressed_ids = torch.tensor(suppressed, dtype=torch.long, device=logits.device)
            began_step = began_prefill
            try:
                for position in range(settings.gen_length):
                    proposal = self._propose(logits, settings, generators, suppressed_ids)
                    commit = response.commit(position, proposal)
                    update_stop_position(canvas, stop_ids, "earliest")
                    is_active, is_broken = response.state(proposal)
                    if is_broken:
                        raise NumericalError(
                            f"the model returned NaN at step {position}; "
                            "try dtype=float32 or bfloat16, and check the weights."
                        )
                    now = time.perf_counter()
                    on_step(response.record(position, now - began_step, commit, proposal))
                    began_step = time.perf_counter()
                    if position == settings.gen_length - 1 or not any(is_active):
                        break
                    logits = response.decode(position, is_active)
            except BaseException:
                if tracker is not None:
                    abort(tracker)
                raise
            done = time.perf_counter()
            cost = response.cost(prefilled - began, done - prefilled)
        return self._output(canvas, None, batch.is_batch, trajectory, cost, tracker, streamer)

    def _batch(
        self,
        prompt: Any,
        images: Any,
        videos: Any,
        settings: Settings,
        input_ids: Any,
        attention_mask: Any,
        extras: dict[str, Any],
        *,
        has_types: bool,
        is_timed: bool,
    ) -> Batch:
        if (prompt is None) == (input_ids is None):
            raise InvalidInputError(
                "pass exactly one of prompt and input_ids, "
                f"got {'none' if prompt is None else 'both'}."
            )
        pad = self.special_ids.pad or 0
        if input_ids is not None:
            if images is not None or videos is not None:
                raise InvalidInputError(
                    "images and videos go with prompt; with input_ids pass pixel_values."
                )
            return batch_from_ids(
                input_ids,
                attention_mask,
                extras,
                self.architecture,
                vocab_size=self.geometry.vocab_size,
                pad_id=pad,
            ).to(self.device)
        given = [name for name, value in extras.items() if value is not None]
        given += ["attention_mask"] if attention_mask is not None else []
        given += ["mm_token_type_ids"] if has_types else []
        if given:
            raise InvalidInputError(
                f"{', '.join(given)} cannot go with prompt, only with input_ids."
            )
        processor: Any = self._given.require_processor("prompt=")
        return batch_from_text(
            processor, prompt, images, videos, settings, pad_id=pad, is_timed=is_timed
        ).to(self.device)

    def _check_lengths(self, batch: Batch, settings: Settings) -> None:
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool()
        tokens = list(self.architecture.placeholder_ids.values())
        is_visual = mask & torch.isin(ids, torch.tensor(tokens, device=ids.device))
        counts = torch.stack([mask.sum(dim=1), is_visual.sum(dim=1)], dim=1).tolist()
        for row, (length, num_visual) in enumerate(counts):
            self._check_length(row, length, num_visual, settings)

    def _propose(
        self,
        logits: Tensor,
        settings: Settings,
        generators: Sequence[torch.Generator],
        suppressed: Tensor,
    ) -> Proposal:
        """The next token of each row, from `(B, V)` logits, which are used up."""
        logits.index_fill_(1, suppressed, float("-inf"))
        drop_unlikely(logits, settings.num_likeliest, settings.top_p, settings.temperature or 1.0)
        uniform = None
        if settings.temperature > 0:
            dtype = torch.float32 if self.device.type == "mps" else torch.float64
            uniform = torch.stack(
                [
                    torch.rand(
                        logits.shape[1], dtype=dtype, generator=generator, device=self.device
                    )
                    for generator in generators
                ]
            )
        return propose(logits, temperature=settings.temperature, uniform=uniform)
