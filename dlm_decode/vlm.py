"""`DiffusionVlm.generate`: the interface that scripts call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dlm_decode import cache as caches
from dlm_decode import samplers, vision
from dlm_decode.base_vlm import BaseVlm, Output, Stop, check_used, synchronize
from dlm_decode.cache import CachePolicy
from dlm_decode.canvas import Prompt
from dlm_decode.cost import Cost, CostMeter, forward_flops, vision_flops
from dlm_decode.decode import decode
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.given import start_canvas
from dlm_decode.inputs import RowInput, encode_row, rows_from_embeds, rows_from_ids, rows_from_text
from dlm_decode.predictor import FULL, TEXT_ONLY, TEXT_ONLY_ORIGINAL, Predictor, View
from dlm_decode.quota import QuotaSchedule
from dlm_decode.record import Trajectory
from dlm_decode.registry import describe
from dlm_decode.samplers.autoregressive import Autoregressive
from dlm_decode.samplers.base import Sampler
from dlm_decode.settings import Settings, resolve_settings
from dlm_decode.track import abort, make_tracker
from dlm_decode.vision.base import AttentionStage, Stage, tower_needs
from dlm_decode.vision.cache_stage import refuse_cache_stages
from dlm_decode.vision.inside import InsideStage
from dlm_decode.vision.packing import StageStack

if TYPE_CHECKING:
    from dlm_decode.models.base import DiffusionModel
    from dlm_decode.models.processing import VlmProcessor

__all__ = ["DiffusionVlm", "Output"]


class DiffusionVlm(BaseVlm):
    """A masked-diffusion vision-language model, ready to be asked.

    Args:
        model: the language model with its vision part.
        processor: tokenizer and image processing; without it only the low-level entries work.
        name: for records.
        generation_defaults: this model's own defaults for `Settings`; they win over those of its
            class.
    """

    own_sampler = "baseline"

    def __init__(
        self,
        model: DiffusionModel,
        processor: VlmProcessor | None = None,
        *,
        name: str = "",
        generation_defaults: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            model,
            processor,
            name=name,
            geometry=model.geometry,
            special_ids=model.special_ids,
        )
        self.generation_defaults = {**model.default_settings, **(generation_defaults or {})}

    def check_sampler(self, sampler: Any) -> None:
        """Raises `InvalidInputError` for the sampler of autoregressive models."""
        if isinstance(sampler, Autoregressive):
            sampler.start(None)

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
            stages: vision stages in order; names, specs or instances. They shrink the prompt, or
                (`fastv`, `lightkv`) what deeper layers see of it. One that prunes while decoding
                (`redvtp`) comes last, and does not go with those between layers; these go with the
                caches that feed windows of the canvas (`prefix`, `dual`, `vicinity:before=0`).
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
        self.check_sampler(chosen_sampler)
        chosen_stages = vision.make_all(stages)
        refuse_cache_stages(chosen_stages, "this is a diffusion model; use another stage")
        attention_stage = _attention_stage(chosen_stages)
        chosen_cache = _cache_policy(cache, chosen_sampler)
        inside = _inside_stages(chosen_stages, chosen_cache, self.geometry.num_layers)
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
        check_used(
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
        check_used({"think_mode": think_mode}, prompt, "prompt")
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
        needs = tower_needs(chosen_stages)
        whole = [encode_row(self.model, row, self.device, needs) for row in rows]
        prompts = []
        for row_prompt in whole:
            for stage in chosen_stages:
                row_prompt = stage.before_lm(row_prompt)
            prompts.append(row_prompt)
        for row, row_prompt in enumerate(whole):
            num_suffix = len(suffix_ids or ())
            self._check_length(row, row_prompt.length, row_prompt.num_visual, settings, num_suffix)
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
            inside=inside,
        )
        trajectory = Trajectory(
            run={
                **self._run_record(
                    chosen_sampler,
                    chosen_stages,
                    {**vars(settings), "schedule": describe(settings.quotas)},
                    [(row.question, row.videos) for row in rows],
                    prompts,
                ),
                "cache": None if chosen_cache is None else describe(chosen_cache),
                "stop_sequences": [list(stop) for stop in stop_ids],
                "suffix_ids": None if suffix_ids is None else list(suffix_ids),
                "prefill_ids": given_prefill,
                "suppress_token_ids": given.suppressed(suppress_token_ids),
            },
            text_of=self.token_text,
        )
        notes = getattr(chosen_sampler, "notes", None)
        trajectory.run["notes"] = [] if notes is None else notes(predictor)
        for stage in [*inside, *([] if attention_stage is None else [attention_stage])]:
            trajectory.run["notes"] += _stage_notes(stage, prompts)
        if probe is not None:
            trajectory.run["probe"] = {
                "positions": probe,
                "flops": {view.name: predictor.forward_cost(view).tolist() for view in probes},
            }
        on_step = self._start(trajectory, tracker, streamer, prompts[0], canvas)
        synchronize(self.device)
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
            layer_visual_tokens=predictor.layer_visual_tokens,
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

    def _preset(self, given: str | None, sampler: Sampler, cache: CachePolicy | None) -> str | None:
        """The preset by its own name: what is given, else the sampler's."""
        if given is not None:
            return self.model.official_preset if given == "official" else given
        chosen = getattr(sampler, "preset", None)
        return None if chosen is None else chosen(cache)

    def _check_pixels(self, rows: Sequence[RowInput]) -> None:
        if any(row.num_tiles for row in rows) and self.geometry.vision is None:
            raise InvalidInputError(
                f"{self.name!r} is a text-only model and cannot read images; "
                "drop images and videos."
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


def _inside_stages(
    stages: Sequence[Stage], cache: CachePolicy | None, num_layers: int
) -> list[InsideStage]:
    """The stages that act between layers; checked before anything runs."""
    inside = [stage for stage in stages if isinstance(stage, InsideStage)]
    if not StageStack(inside, num_layers).layers:
        return []
    names = [describe(stage)["name"] for stage in inside]
    others = [describe(stage)["name"] for stage in stages if isinstance(stage, AttentionStage)]
    if others:
        raise InvalidInputError(
            f"stages {names} act between layers, and {others} prune the prompt by the attention of "
            "whole layers; use one kind."
        )
    if cache is not None and not getattr(cache, "windows_lie_in_canvas", False):
        raise InvalidInputError(
            f"stages {names} shorten the sequence between layers, and cache "
            f"{describe(cache)['name']!r} may feed parts of the prompt or keep states of whole "
            "layers; use cache 'prefix', 'dual' or 'vicinity:before=0', or none."
        )
    return inside


def _stage_notes(stage: Stage, prompts: Sequence[Prompt]) -> list[str]:
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
