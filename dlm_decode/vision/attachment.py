"""Vision stages on stock autoregressive models of transformers, by hooks.

Inside `with attach(model, stages):` every run of the model is shortened as the stages say, also in
transformers' own `model.generate(...)`. Nothing of the model is left changed afterwards.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dlm_decode import vision
from dlm_decode.canvas import Prompt
from dlm_decode.errors import InvalidInputError
from dlm_decode.models.autoregressive import architecture_of
from dlm_decode.models.autoregressive.base import Media
from dlm_decode.models.autoregressive.tower import TowerAttention
from dlm_decode.registry import describe
from dlm_decode.vision.base import AttentionStage, Stage, tower_needs
from dlm_decode.vision.cache_stage import refuse_cache_stages
from dlm_decode.vision.inside import InsideStage, layout_of
from dlm_decode.vision.layer_hooks import LayerReducer
from dlm_decode.vision.placeholders import PromptRow, prompts_of

__all__ = ["Attachment", "attach", "stages_for"]

_attached: WeakSet[nn.Module] = WeakSet()


@contextmanager
def attach(
    model: nn.Module, stages: Sequence[Stage | str] | Stage | str | None
) -> Iterator[Attachment]:
    """Lets vision stages act on a stock model.

    Works with batches, padding on the left, beams, and caches that grow (`DynamicCache`). Generated
    tokens go on from the position that the stages left the prompt with. A run that no stage changes
    is bit-equal to one outside.

    Args:
        model: a `...ForConditionalGeneration` of one of `dlm_decode.models.autoregressive.names()`.
        stages: in order; a name, a spec, an instance, or several of them.

    Yields:
        Attachment: what the stages made of the last prefill.

    Raises:
        UnknownNameError: another kind of model, or an unknown stage.
        InvalidInputError: a stage that only diffusion models can run, or that shortens the cache
            behind the prefill (`CacheStage`); stages that are attached already; while attached,
            inputs without ids or pictures that were encoded before.

    Example:
        ```python
        with attach(model, "stride:keep_ratio=0.25"):
            ids = model.generate(**processor(images=image, text=text, return_tensors="pt"))
        ```
    """
    chosen = stages_for(stages)
    refuse_cache_stages(
        chosen,
        "transformers' own generate reads how far it is from the cache's length; use "
        "dlm_decode.load(...).generate(stages=...)",
    )
    attachment = Attachment(model, chosen)
    if model in _attached:
        raise InvalidInputError(
            "this model has stages attached already; pass all of them to one attach(...)."
        )
    _attached.add(model)
    try:
        with attachment.hooks():
            yield attachment
    finally:
        _attached.discard(model)


def stages_for(stages: Sequence[Stage | str] | Stage | str | None) -> tuple[Stage, ...]:
    """The stages as instances, see `dlm_decode.vision.make_all`.

    Raises:
        UnknownNameError: an unknown stage or option.
        InvalidInputError: one that prunes by what masked response positions attend to.
    """
    chosen = tuple(vision.make_all(stages))
    for stage in chosen:
        if isinstance(stage, AttentionStage):
            raise InvalidInputError(
                f"stage {describe(stage)['name']!r} prunes by what masked response positions "
                "attend to, and an autoregressive model has none; use another stage."
            )
    return chosen


@dataclass(frozen=True)
class _Prefill:
    """What decode steps have to know of the prefill they go on from.

    Attributes:
        num_given: prompt columns before the stages.
        mask: `(B, S)` long, 1 at positions that were left.
        ends: `(B,)` rotary positions of the first generated tokens.
        num_axes: 3 with M-RoPE, else 1.
    """

    num_given: int
    mask: Tensor
    ends: Tensor
    num_axes: int


class Attachment:
    """The stages of one `attach`, and what they did.

    Args:
        model: as in `attach`.
        stages: instances.

    Attributes:
        given: one prompt per row of the last prefill, before the stages.
        prompts: the same, as the language model reads them.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        self.model, self.stages = model, tuple(stages)
        self.architecture = architecture_of(model.config)
        self.given: tuple[Prompt, ...] = ()
        self.prompts: tuple[Prompt, ...] = ()
        self._needs = tower_needs(self.stages)
        self._media: dict[str, list[Media]] = {}
        self._is_used = False
        self._ids: Tensor | None = None
        self._prefill: _Prefill | None = None
        self._num_given, self._num_axes = 0, 1  # of the last prefill, see `_Prefill`
        inside = [stage for stage in self.stages if isinstance(stage, InsideStage)]
        num_layers = self.architecture.geometry.num_layers
        is_active = any(stage.layers(num_layers) for stage in inside)
        self._reducer = LayerReducer(inside, num_layers) if is_active else None

    @property
    def acts_between_layers(self) -> bool:
        """Whether any stage does."""
        return self._reducer is not None

    @property
    def layer_lengths(self) -> list[tuple[int, ...]]:
        """Positions of the prompt that each layer works on, by layer and row."""
        if self._reducer is not None:
            return list(self._reducer.lengths)
        lengths = tuple(prompt.length for prompt in self.prompts)
        return [lengths] * self.architecture.geometry.num_layers

    @property
    def layer_scores(self) -> list[tuple[int, ...]]:
        """Pairs of a query and a key that stages scored behind each layer, by layer and row."""
        if self._reducer is not None:
            return list(self._reducer.num_scores)
        return [(0,) * len(self.prompts)] * self.architecture.geometry.num_layers

    def shortened(self, mask: Tensor) -> None:
        """Lets decode steps go on from a prefill of which other columns are cached than were given.

        Args:
            mask: `(B, S)` long, 1 at what is cached of each row's prompt.
        """
        ends = torch.tensor([prompt.next_position for prompt in self.prompts], device=mask.device)
        self._prefill = _Prefill(self._num_given, mask, ends, self._num_axes)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Installs the hooks, and removes them at the end, whatever happens."""
        core = self.architecture.core(self.model)
        text_model = self.architecture.text_model(self.model)
        with ExitStack() as stack:
            for handle in (
                core.register_forward_pre_hook(self._note_ids, with_kwargs=True),
                text_model.register_forward_pre_hook(self._shape, with_kwargs=True),
            ):
                stack.callback(handle.remove)
            for modality in self.architecture.placeholder_ids:
                stack.enter_context(self._observed(core, modality))
            if self._reducer is not None:
                stack.enter_context(self._reducer.hooks(text_model))
            yield

    @contextmanager
    def _observed(self, core: Any, modality: str) -> Iterator[None]:
        """Takes notes of the calls of an encoder, which transformers makes from several places."""
        name = self.architecture.encoder_name(modality)
        encode: Callable[..., Any] = getattr(core, name)
        signature = inspect.signature(encode)

        @functools.wraps(encode)
        def observed(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            with self._probed(modality) as tower:
                outputs = encode(*args, **kwargs)
            self._note_media(modality, arguments, outputs, tower)
            return outputs

        setattr(core, name, observed)
        try:
            yield
        finally:
            delattr(core, name)

    @contextmanager
    def _probed(self, modality: str) -> Iterator[list[TowerAttention]]:
        """Collects the attention of the vision tower where a stage needs it."""
        seen: list[TowerAttention] = []
        if not self._needs:
            yield seen
            return
        attention = self.architecture.tower_attention(self.model, modality)

        def look(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            with torch.no_grad():
                seen.append(self.architecture.probe(module, {**arguments, **kwargs}, self._needs))

        handle = attention.register_forward_hook(look, with_kwargs=True)
        try:
            yield seen
        finally:
            handle.remove()

    def _note_media(
        self,
        modality: str,
        arguments: Mapping[str, Any],
        outputs: Any,
        tower: Sequence[TowerAttention],
    ) -> None:
        if self._is_used:
            self._media, self._is_used = {}, False
        self._media.setdefault(modality, []).extend(
            self.architecture.media(
                self.model,
                modality,
                arguments,
                [len(entry) for entry in outputs.pooler_output],
                tower[0] if tower else None,
            )
        )

    def _note_ids(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._ids = kwargs.get("input_ids", args[0] if args else None)

    def _shape(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """The text model's arguments as the stages want them."""
        cache = kwargs.get("cache")
        num_cached = 0 if cache is None else cache.get_seq_length()
        changes = self._go_on(kwargs, num_cached) if num_cached else self._begin(kwargs)
        return args, {**kwargs, **changes}

    def _begin(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that differ in a prefill."""
        self._prefill = None
        rows = self._rows(kwargs)
        self._num_given = kwargs["inputs_embeds"].shape[1]
        self._num_axes = rows[0].position_ids.shape[0] if rows[0].position_ids.dim() == 2 else 1
        self.given = self.prompts = tuple(
            prompts_of(
                rows,
                self._media,
                self.architecture.placeholder_ids,
                joins_tiles=self.architecture.joins_tiles,
            )
        )
        self._is_used = True
        for stage in self.stages:
            self.prompts = tuple(map(stage.before_lm, self.prompts))
        is_same = all(new is old for new, old in zip(self.prompts, self.given, strict=True))
        is_same = is_same and (self._reducer is None or _is_padded_left(kwargs))
        given = kwargs["inputs_embeds"]
        longest = max(prompt.length for prompt in self.prompts)
        num_rows, length = len(rows), given.shape[1] if is_same else longest
        if self._reducer is not None:
            padding = [length - prompt.length for prompt in self.prompts]
            self._reducer.begin([layout_of(prompt) for prompt in self.prompts], padding)
        if is_same:
            return {}
        num_axes = self._num_axes
        embeds = given.new_zeros(num_rows, length, given.shape[-1])
        mask = torch.zeros(num_rows, length, dtype=torch.long, device=given.device)
        positions = torch.zeros_like(mask).expand(num_axes, -1, -1).clone()
        for row, prompt in enumerate(self.prompts):
            start = length - prompt.length
            embeds[row, start:] = prompt.embeds.to(given.dtype)
            mask[row, start:] = 1
            positions[:, row, start:] = prompt.positions()
        self.shortened(mask)
        return {
            "inputs_embeds": embeds,
            "attention_mask": mask,
            "position_ids": positions if num_axes > 1 else positions[0],
        }

    def _rows(self, kwargs: Mapping[str, Any]) -> list[PromptRow]:
        """The rows of a prefill, without padding."""
        embeds, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
        if self._ids is None:
            raise InvalidInputError(
                "stages find visual tokens by their ids; pass input_ids instead of inputs_embeds."
            )
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            raise InvalidInputError(
                "stages work with attention masks of shape (B, S) only; leave cache_implementation "
                "at its default."
            )
        num_rows, length = embeds.shape[:2]
        is_real = torch.ones(num_rows, length, dtype=torch.bool) if mask is None else mask.bool()
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=embeds.device)
        # Qwen2.5-VL is given 4 axes by `generate`: a plain count, then the rotary ones.
        positions = positions[-3:] if positions.dim() == 3 else positions
        positions = positions.expand(*positions.shape[:-2], num_rows, length)
        is_real = is_real.to(embeds.device)
        ends = positions.masked_fill(~is_real, -1).movedim(-2, 0).flatten(1).amax(dim=1) + 1
        return [
            PromptRow(
                self._ids[row][is_real[row]],
                embeds[row][is_real[row]],
                positions[..., row, :][..., is_real[row]],
                end,
            )
            for row, end in enumerate(ends.tolist())
        ]

    def _go_on(self, kwargs: Mapping[str, Any], num_cached: int) -> dict[str, Any]:
        """Arguments that differ in a decode step."""
        embeds = kwargs["inputs_embeds"]
        num_rows, num_new = embeds.shape[:2]
        if num_new > 1:  # a single one is a generated token, whatever its id
            self._refuse_pictures()
        if self._prefill is None:
            return {}
        prefill = self._prefill
        num_done = num_cached - prefill.mask.shape[1]
        if num_rows != len(prefill.mask) or num_done < 0:
            raise InvalidInputError(
                "the cache is not that of the last prefill with these stages; decode each prompt "
                "to its end before the next, without assisted decoding."
            )
        given = kwargs.get("attention_mask")
        tail = (
            prefill.mask.new_ones(num_rows, num_done + num_new)
            if given is None
            else given[:, prefill.num_given :].to(prefill.mask.dtype)
        )
        steps = torch.arange(num_new, device=embeds.device) + num_done
        positions = prefill.ends[:, None] + steps
        return {
            "attention_mask": torch.cat([prefill.mask, tail], dim=1),
            "position_ids": positions.expand(prefill.num_axes, -1, -1)
            if prefill.num_axes > 1
            else positions,
        }

    def _refuse_pictures(self) -> None:
        if not self.stages or self._ids is None:
            return
        for modality, token in self.architecture.placeholder_ids.items():
            if bool((self._ids == token).any()):
                raise InvalidInputError(
                    f"a new {modality} follows on a cache; stages need whole prompts. Start "
                    "without a cache."
                )


def _is_padded_left(kwargs: Mapping[str, Any]) -> bool:
    """Whether a prefill has padding nowhere but in front of its rows."""
    mask = kwargs.get("attention_mask")
    return mask is None or not bool((mask.long().diff(dim=1) < 0).any())
