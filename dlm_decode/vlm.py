"""`DiffusionVlm.generate`: the interface that scripts call."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dlm_decode import cache as caches
from dlm_decode import samplers, vision
from dlm_decode.cache import CachePolicy
from dlm_decode.canvas import Canvas, Prompt
from dlm_decode.cost import Cost, CostMeter, forward_flops, vision_flops
from dlm_decode.decode import decode
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.given import GivenIds, start_canvas
from dlm_decode.inputs import RowInput, encode_row, rows_from_embeds, rows_from_ids, rows_from_text
from dlm_decode.predictor import FULL, TEXT_ONLY, TEXT_ONLY_ORIGINAL, Predictor, View
from dlm_decode.quota import QuotaSchedule
from dlm_decode.record import StepRecord, Trajectory
from dlm_decode.registry import describe
from dlm_decode.samplers.base import Sampler
from dlm_decode.settings import Settings, resolve_settings
from dlm_decode.track import Tracker, abort, make_tracker
from dlm_decode.vision.base import AttentionStage, Stage

if TYPE_CHECKING:
    from dlm_decode.models.base import DiffusionModel
    from dlm_decode.models.processing import VlmProcessor

__all__ = ["DiffusionVlm", "Output"]

Stop = str | int | Sequence[int]


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


class DiffusionVlm:
    """A masked-diffusion vision-language model, ready to be asked.

    Args:
        model: the language model with its vision part.
        processor: tokenizer and image processing; without it only the low-level entries work.
        name: for records.
        generation_defaults: this model's own defaults for `Settings`; they win over those of its
            class.
    """

    def __init__(
        self,
        model: DiffusionModel,
        processor: VlmProcessor | None = None,
        *,
        name: str = "",
        generation_defaults: dict[str, Any] | None = None,
    ) -> None:
        self.model = model.eval()
        self.geometry = model.geometry
        self.processor = processor
        self.name = name or type(model).__name__
        self.generation_defaults = {**model.default_settings, **(generation_defaults or {})}

    @property
    def device(self) -> torch.device:
        """Where prompts and canvas live: with the input embeddings."""
        return cast(nn.Embedding, self.model.get_input_embeddings()).weight.device

    @property
    def fingerprint(self) -> str:
        """Short hash of some numbers of every weight, to tell two trainings of a model apart."""
        digest = hashlib.sha256()
        for name, weight in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(weight.flatten()[:64].float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        images: Any = None,
        videos: Any = None,
        *,
        sampler: Sampler | str = "baseline",
        stages: Sequence[Stage | str] | Stage | str | None = (),
        cache: CachePolicy | str | None = None,
        gen_length: int | None = None,
        steps: int | None = None,
        block_length: int | None = None,
        schedule: QuotaSchedule | str | None = None,
        steps_per_block: int | None = None,
        step_ratio: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        cfg_scale: float | None = None,
        seed: int | Sequence[int] | None = None,
        eos_last: bool | None = None,
        preset: str | None = None,
        max_frames: int | None = None,
        fps: float | None = None,
        force_sample: bool | None = None,
        frame_rate: float | None = None,
        time_instruction: bool | None = None,
        think_mode: str | None = None,
        stop: Sequence[Stop] | Stop | bool | None = None,
        suffix: str | Sequence[int] | None = None,
        prefill: str | Sequence[int] | Sequence[str | Sequence[int] | None] | None = None,
        suppress_token_ids: Sequence[int] = (),
        streamer: Any = None,
        track: Any = None,
        probe: str | None = None,
        input_ids: Any = None,
        pixel_values: Any = None,
        image_sizes: Any = None,
        modalities: Any = None,
        inputs_embeds: Any = None,
    ) -> Output:
        """Answers one prompt or a batch.

        Exactly one of `prompt`, `input_ids` and `inputs_embeds` is given. Rows of a batch get the
        tokens that they would get alone. Lengths left out come from the model's own defaults, then
        from `Settings`.

        Args:
            prompt: the question, or a list of questions.
            images: an image or a list of images for one prompt (path, PIL image or array); one such
                entry per prompt for a batch.
            videos: likewise; a video is a file, a folder of frames, a list of images, or an array
                `(F, H, W, 3)`. A list of videos is a list of lists.
            sampler: name, spec (`"baseline:remasking=margin"`) or instance.
            stages: vision stages that shrink the prompt, in order; names, specs or instances. One
                that prunes while decoding (`redvtp`) comes last.
            cache: cache policy, as a name, a spec (`"prefix:refresh_interval=32"`) or an instance;
                `None` is the sampler's own (most have none), `"none"` recomputes everything.
            gen_length: canvas length in tokens.
            steps: steps over all blocks; default `gen_length`, one token per step.
            block_length: positions per block; default `gen_length`, one block.
            schedule: how a block's positions are shared out among its steps, as a name
                (`dlm_decode.quota.names()`), a spec (`"shift:shift=0.25"`) or an instance.
            steps_per_block: instead of `steps`; a block takes no more than it has positions.
            step_ratio: instead of `steps`: steps per position of a block, rounded down.
            temperature: 0 is greedy.
            top_k: only that many likeliest tokens take part, in proposals and confidences.
            top_p: only the likeliest tokens up to this probability take part.
            cfg_scale: classifier-free guidance; 0 is off.
            seed: one number (every row uses it), or one per row.
            eos_last: commit end-of-sequence ids only when nothing else is left.
            preset: `"official"` for the official program with its quirks; `None` is the sampler's
                own (most have none).
            max_frames: frames that are taken of a video at most; more are thinned out evenly.
            fps: frames per second to take of a video; every frame where neither this nor the
                model's own default says otherwise.
            force_sample: take `max_frames` of every video at even distances, repeats included.
            frame_rate: frames per second of folders, lists and arrays, which do not say it.
            time_instruction: tell the model how long each video is and where its frames lie.
            think_mode: `"think"`, `"no_think"` or `"none"`, for models that were trained with it.
            stop: stop strings, ids or id sequences, in addition to the model's own; `False` for no
                stop at all. With the official preset only what is given here stops.
            suffix: text or ids that follow the canvas and are read by the model; appended to
                `sequences`.
            prefill: text or ids that the canvas starts from; mask ids in it are decoded, everything
                else is kept (infilling). For a batch a list with one entry per row. A prefill with
                mask ids is a template: without `gen_length`, the canvas is as long as the longest.
                In text `<mask:4>` is a hole of four tokens, and `<infill:4>`, for LaViDa's
                infilling checkpoint, one of at most four; see `dlm_decode.infill`.
            suppress_token_ids: further ids that are never proposed.
            streamer: object with `put`, `put_draft` and `end`, as transformers'
                `TextDiffusionStreamer`; one row only.
            track: `"wandb"`, `"trackio"`, `"jsonl:PATH"`, a tracker, or a list of them.
            probe: `"packed"` or `"original"` records in every step what the model would propose
                with and without visual tokens (in these rotary positions), whatever the sampler
                asks; `dlm-decode analyse` reads it. It costs time, but is not charged and changes
                no token.
            input_ids: ids with the placeholder -200 per image; a list of 1-D tensors for a batch.
            pixel_values: preprocessed pixels that go with `input_ids`.
            image_sizes: `(width, height)` of the images that go with `input_ids`.
            modalities: `"image"` or `"video"` for each.
            inputs_embeds: `(P, D)` ready prompt embeddings; a list for a batch.

        Returns:
            Output.

        Raises:
            InvalidInputError: arguments that cannot work, named with what is allowed.
            UnknownNameError: an unknown sampler, stage, cache, option or preset, with the nearest
                name.
            MediaError: an image or video that cannot be read.
            NumericalError: NaN logits.
        """
        began = time.perf_counter()
        chosen_sampler = samplers.make(sampler)
        chosen_stages = vision.make_all(stages)
        attention_stage = _attention_stage(chosen_stages)
        chosen_cache = _cache_policy(cache, chosen_sampler)
        given = self._given
        given_prefill = given.prefill(prefill)
        settings = resolve_settings(
            {
                "gen_length": given.template_length(given_prefill)
                if gen_length is None
                else gen_length,
                "steps": steps,
                "block_length": block_length,
                "schedule": schedule,
                "steps_per_block": steps_per_block,
                "step_ratio": step_ratio,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "cfg_scale": cfg_scale,
                "seed": tuple(seed) if isinstance(seed, (list, tuple)) else seed,
                "eos_last": eos_last,
                "preset": self._preset(preset, chosen_sampler, chosen_cache),
                "max_frames": max_frames,
                "fps": fps,
                "force_sample": force_sample,
                "frame_rate": frame_rate,
                "time_instruction": time_instruction,
                "think_mode": think_mode,
            },
            self.generation_defaults,
        )
        _check_used(
            {
                "max_frames": max_frames,
                "fps": fps,
                "force_sample": force_sample,
                "frame_rate": frame_rate,
                "time_instruction": time_instruction,
            },
            videos,
            "videos",
        )
        _check_used({"think_mode": think_mode}, prompt, "prompt")
        stop_ids = given.stop_sequences(stop, settings)
        suffix_ids = given.ids(suffix, "suffix")
        tracker = make_tracker(track)
        probes = _probes(probe)
        rows, is_batch = self._rows(
            prompt,
            images,
            videos,
            input_ids,
            pixel_values,
            image_sizes,
            modalities,
            inputs_embeds,
            settings,
            is_timed=fps is not None,
        )
        if streamer is not None and len(rows) > 1:
            raise InvalidInputError(
                f"a streamer shows one row, got {len(rows)} prompts; drop it or pass one prompt."
            )
        self._check_pixels(rows)
        whole = [encode_row(self.model, row, self.device) for row in rows]
        prompts = []
        for row_prompt in whole:
            for stage in chosen_stages:
                row_prompt = stage.before_lm(row_prompt)
            prompts.append(row_prompt)
        self._check_context(whole, settings, len(suffix_ids or ()))
        canvas = start_canvas(
            prompts, settings, given_prefill, self.model.special_ids.mask, self.device
        )
        is_open = canvas.is_open[:, canvas.lead :].tolist()
        baseline = [
            self._baseline_cost(row_prompt, row_is_open, settings, len(suffix_ids or ()))
            for row_prompt, row_is_open in zip(whole, is_open, strict=True)
        ]
        meter = CostMeter(self.geometry, len(rows))
        predictor = Predictor(
            self.model,
            prompts,
            canvas,
            settings=settings,
            generators=self._generators(settings, len(rows)),
            meter=meter,
            suffix_ids=None if suffix_ids is None else torch.tensor(suffix_ids),
            suppressed_ids=given.suppressed(suppress_token_ids),
            baseline_flops=[flops for flops, _ in baseline],
            cache=chosen_cache,
            stage=attention_stage,
        )
        trajectory = Trajectory(
            run={
                **self._run_record(
                    chosen_sampler, chosen_stages, chosen_cache, settings, rows, prompts
                ),
                "stop_sequences": [list(stop) for stop in stop_ids],
                "suffix_ids": None if suffix_ids is None else list(suffix_ids),
                "prefill_ids": given_prefill,
                "suppress_token_ids": given.suppressed(suppress_token_ids),
            },
            text_of=self.token_text,
        )
        notes = getattr(chosen_sampler, "notes", None)
        trajectory.run["notes"] = [] if notes is None else notes(predictor)
        if attention_stage is not None:
            trajectory.run["notes"] += _stage_notes(attention_stage, prompts)
        if probe is not None:
            trajectory.run["probe"] = {
                "positions": probe,
                "flops": {view.name: predictor.forward_cost(view).tolist() for view in probes},
            }
        if tracker is not None:
            tracker.start(trajectory.run)
        if streamer is not None:
            streamer.put(prompts[0].ids[~prompts[0].is_visual].cpu())

        def on_step(record: StepRecord) -> None:
            trajectory.steps.append(record)
            if tracker is not None:
                tracker.step(record.to_dict(self.token_text))
            if streamer is not None:
                streamer.put_draft(canvas.tokens[0, canvas.lead :].cpu())

        _synchronize(self.device)
        prefilled = time.perf_counter()
        try:
            decode(
                predictor,
                chosen_sampler,
                settings,
                stops=stop_ids,
                last=_last_ids(predictor, stop_ids) if settings.eos_last else (),
                on_step=on_step,
                probes=probes,
            )
        except BaseException:
            if tracker is not None:
                abort(tracker)
            raise
        done = time.perf_counter()
        vision_part = self.geometry.vision
        tiles = sum(row.num_tiles for row in rows)
        cost = Cost(
            flops=meter.flops,
            head_flops=meter.head_flops,
            vision_flops=vision_flops(vision_part, tiles)
            if vision_part is not None and tiles
            else 0,
            baseline_flops=sum(flops for flops, _ in baseline),
            calls=meter.calls,
            forwards=dict(meter.forwards),
            baseline_forwards=sum(count for _, count in baseline),
            kv_bytes=meter.kv_bytes,
            prompt_lengths=tuple(row_prompt.length for row_prompt in prompts),
            visual_tokens=tuple(row_prompt.num_visual for row_prompt in prompts),
            seconds_prefill=prefilled - began,
            seconds_decode=done - prefilled,
            row_flops=tuple(meter.row_flops),
            row_baseline_flops=tuple(flops for flops, _ in baseline),
            row_baseline_forwards=tuple(count for _, count in baseline),
            row_forwards=tuple(dict(counts) for counts in meter.row_forwards),
            row_view_flops=tuple(dict(flops) for flops in meter.row_view_flops),
            kept_visual_tokens=predictor.kept_visual_tokens,
        )
        return self._output(canvas, suffix_ids, is_batch, trajectory, cost, tracker, streamer)

    def _rows(
        self,
        prompt: Any,
        images: Any,
        videos: Any,
        input_ids: Any,
        pixel_values: Any,
        image_sizes: Any,
        modalities: Any,
        inputs_embeds: Any,
        settings: Settings,
        is_timed: bool,
    ) -> tuple[list[RowInput], bool]:
        named = {"prompt": prompt, "input_ids": input_ids, "inputs_embeds": inputs_embeds}
        given = [name for name, value in named.items() if value is not None]
        if len(given) != 1:
            raise InvalidInputError(
                "pass exactly one of prompt, input_ids and inputs_embeds, "
                f"got {' and '.join(given) or 'none'}."
            )
        if given != ["prompt"] and (images is not None or videos is not None):
            raise InvalidInputError(
                f"images and videos go with prompt; with {given[0]} pass pixel_values."
            )
        if given != ["input_ids"] and any(
            value is not None for value in (pixel_values, image_sizes, modalities)
        ):
            raise InvalidInputError("pixel_values, image_sizes and modalities go with input_ids.")
        if input_ids is not None:
            rows = rows_from_ids(input_ids, pixel_values, image_sizes, modalities)
            return rows, isinstance(input_ids, (list, tuple)) and not isinstance(input_ids[0], int)
        if inputs_embeds is not None:
            return rows_from_embeds(inputs_embeds), isinstance(inputs_embeds, (list, tuple))
        processor = self._given.require_processor("prompt=")
        is_batch = not isinstance(prompt, str)
        prompts = list(prompt) if is_batch else [prompt]
        if not prompts:
            raise InvalidInputError("prompt is an empty list; pass at least one question.")
        rows = rows_from_text(processor, prompts, images, videos, is_batch, settings, is_timed)
        return rows, is_batch

    @property
    def _given(self) -> GivenIds:
        return GivenIds(
            self.processor,
            self.model.special_ids,
            self.geometry.vocab_size,
            self.model.num_valid_tokens,
            self.name,
        )

    def _preset(self, given: str | None, sampler: Sampler, cache: CachePolicy | None) -> str | None:
        """The preset by its own name: what is given, else the sampler's."""
        if given is not None:
            return self.model.official_preset if given == "official" else given
        chosen = getattr(sampler, "preset", None)
        return None if chosen is None else chosen(cache)

    def _generators(self, settings: Settings, num_rows: int) -> list[torch.Generator]:
        seeds = settings.seed if isinstance(settings.seed, tuple) else (settings.seed,) * num_rows
        if len(seeds) != num_rows:
            raise InvalidInputError(
                f"seed has {len(seeds)} entries for {num_rows} rows; "
                "give one number or one per row."
            )
        return [torch.Generator(self.device).manual_seed(seed) for seed in seeds]

    def _check_pixels(self, rows: Sequence[RowInput]) -> None:
        if any(row.num_tiles for row in rows) and self.geometry.vision is None:
            raise InvalidInputError(
                f"{self.name!r} is a text-only model and cannot read images; "
                "drop images and videos."
            )

    def _check_context(
        self, prompts: Sequence[Prompt], settings: Settings, num_suffix: int
    ) -> None:
        names = ("max_position_embeddings", "tokenizer_model_max_length")
        limits = [getattr(self.model.config, name, None) for name in names]
        limit = min((value for value in limits if value is not None), default=None)
        for row, prompt in enumerate(prompts):
            total = prompt.length + settings.gen_length + num_suffix
            if limit is not None and total > limit:
                raise InvalidInputError(
                    f"prompt {row} has {prompt.length} positions ({prompt.num_visual} visual); "
                    f"with gen_length {settings.gen_length} and a suffix of {num_suffix} "
                    f"that is {total}, and the model reads at most {limit}; "
                    "shorten the prompt, use fewer or smaller images, fewer frames (max_frames), "
                    "or a smaller gen_length."
                )

    def _baseline_cost(
        self, prompt: Prompt, is_open: list[bool], settings: Settings, num_suffix: int
    ) -> tuple[int, int]:
        """FLOPs and forwards of the baseline sampler for one row.

        Neither a stage nor an early stop is assumed.
        """
        count = settings.blocks.num_steps(is_open) * (2 if settings.cfg_scale > 0 else 1)
        length = prompt.length + settings.gen_length + num_suffix
        return count * forward_flops(self.geometry, length, length), count

    def token_text(self, token: int) -> str:
        """Text of one id; `<id>` without a tokenizer."""
        if self.processor is None or token < 0:
            return f"<{token}>"
        return self.processor.token_text(token)

    def decode_text(self, ids: Sequence[int]) -> str:
        """Text of a response; the ids without a tokenizer."""
        if self.processor is None:
            return " ".join(map(str, ids))
        unwritten = self.model.special_ids.unwritten
        return self.processor.decode([token for token in ids if token not in unwritten])

    def _run_record(
        self,
        sampler: Sampler,
        stages: Sequence[Stage],
        cache: CachePolicy | None,
        settings: Settings,
        rows: Sequence[RowInput],
        prompts: Sequence[Prompt],
    ) -> dict[str, Any]:
        import transformers

        try:
            own_version = version("dlm-decode")
        except PackageNotFoundError:
            own_version = "uninstalled"
        fields = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
        fields["schedule"] = describe(settings.quotas)
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
            "cache": None if cache is None else describe(cache),
            "settings": fields,
            "mask_token_id": self.model.special_ids.mask,
            "padding_ids": list(self.model.special_ids.padding),
            "rows": [
                {
                    "prompt_length": prompt.length,
                    "visual_tokens": prompt.num_visual,
                    "question": row.question,
                    "videos": list(row.videos),
                }
                for row, prompt in zip(rows, prompts, strict=True)
            ],
        }

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
        special = self.model.special_ids
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


def _check_used(options: dict[str, Any], value: Any, name: str) -> None:
    """Refuses options that go with an argument that is not there."""
    is_there = value is not None and (not isinstance(value, (list, tuple)) or len(value) > 0)
    given = [key for key, option in options.items() if option is not None]
    if given and not is_there:
        raise InvalidInputError(
            f"{', '.join(given)} {'goes' if len(given) == 1 else 'go'} with {name}=, and there is "
            f"none; pass {name}=, or leave {'it' if len(given) == 1 else 'them'} out."
        )


def _cache_policy(cache: CachePolicy | str | None, sampler: Sampler) -> CachePolicy | None:
    chosen = getattr(sampler, "cache", None) if cache is None else cache
    return None if chosen in (None, "none") else caches.make(chosen)


def _attention_stage(stages: Sequence[Stage]) -> AttentionStage | None:
    """The stage that prunes while decoding, if there is one."""
    for place, stage in enumerate(stages):
        if not isinstance(stage, AttentionStage):
            continue
        if place < len(stages) - 1:
            name, behind = (describe(stages[at])["name"] for at in (place, place + 1))
            raise InvalidInputError(
                f"stage {name!r} prunes after the first step, and {behind!r} is listed behind it; "
                f"put {name!r} last, and use only one stage of its kind."
            )
        return stage
    return None


def _stage_notes(stage: AttentionStage, prompts: Sequence[Prompt]) -> list[str]:
    rows = [row for row, prompt in enumerate(prompts) if not prompt.num_visual]
    name = describe(stage)["name"]
    return [f"rows {rows} have no visual tokens; {name} leaves them as they are."] if rows else []


def _probes(probe: str | None) -> tuple[View, ...]:
    views = {"packed": TEXT_ONLY, "original": TEXT_ONLY_ORIGINAL}
    if probe is None:
        return ()
    if probe not in views:
        raise UnknownNameError("probe", probe, views)
    return (FULL, views[probe])


def _last_ids(predictor: Predictor, stops: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Ids that `eos_last` holds back: padding and single-id stops."""
    return tuple(sorted({*predictor.padding_ids, *(stop[0] for stop in stops if len(stop) == 1)}))


def _synchronize(device: torch.device) -> None:
    """Waits for queued work, so that prefill seconds are not booked on the first step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
