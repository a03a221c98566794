"""Stages between the layers of stock transformers models, through hooks; no class is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from dlm_decode.errors import InvalidInputError
from dlm_decode.vision.attention_look import looking_at
from dlm_decode.vision.inside import InsideStage, RowLayout
from dlm_decode.vision.layer_masks import Columns, decode_mask, prefill_mask
from dlm_decode.vision.packing import Attended, Rows, StageStack

__all__ = ["LayerReducer"]


@dataclass
class _Call:
    """One prefill and the decoding steps behind it."""

    layouts: Sequence[RowLayout]
    padding: Sequence[int]
    position_ids: Tensor | None = None
    num_columns: int = 0  # S of the prefill; 0 until it has begun
    is_prefill: bool = True
    rows: Rows | None = None  # what the layer works on that runs in the prefill
    rotary: Any = None  # cosines and sines of these rows, once they have been reduced
    attended: Attended | None = None  # by the layer that ran last, if a stage asks
    columns: list[Columns] = field(default_factory=list)  # by layer
    num_scores: list[tuple[int, ...]] = field(default_factory=list)  # by layer


class LayerReducer:
    """Runs stages between the decoder layers of a text model, in its prefill.

    The model is any of transformers' whose text model has `layers`, each with a `self_attn`, and a
    `rotary_emb`: Llama, Qwen2, Qwen3, the text model of Qwen2.5-VL, and what is built from them.
    Layers in front of a stage keep all keys and values, the others those that are left. Generated
    tokens keep the positions of the unreduced sequence. Attention stays with the model's backend;
    where a stage asks for it, queries and keys of that one layer are looked at.

    Supported are caches that grow (`DynamicCache`) and prefills in one piece; rows are padded on
    the left.

    Args:
        stages: act in this order behind the same layer.
        num_layers: decoder layers.

    Raises:
        InvalidInputError: as `StageStack`.

    Example:
        with reducer.hooks(model.language_model):
            reducer.begin([layout_of(prompt)], [0])
            model.generate(...)
    """

    def __init__(self, stages: Sequence[InsideStage], num_layers: int) -> None:
        self._stack = StageStack(stages, num_layers)
        self._call: _Call | None = None

    def begin(self, layouts: Sequence[RowLayout], padding: Sequence[int]) -> None:
        """Makes the next forward a prefill; call it before each.

        Args:
            layouts: what the positions of each row are. A batch with several times as many rows
                (beams, several answers) repeats each of them.
            padding: columns of padding in front of each row.
        """
        if len(layouts) != len(padding) or not layouts:
            raise InvalidInputError(
                f"{len(layouts)} layouts and {len(padding)} paddings were given; give one of each "
                "per row."
            )
        self._call = _Call(layouts, padding)

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Positions that each layer worked on in the prefill: `lengths[layer][row]`."""
        return tuple(columns.lengths for columns in self._prefilled.columns)

    @property
    def num_scores(self) -> tuple[tuple[int, ...], ...]:
        """Pairs that stages scored behind each layer, likewise."""
        return tuple(self._prefilled.num_scores)

    @property
    def positions(self) -> tuple[tuple[Tensor, ...], ...]:
        """`(n,)` which positions of a row each layer worked on, padding not counted, likewise."""
        call = self._prefilled
        return tuple(
            tuple(
                index[padding:] - first
                for index, padding, first in zip(
                    columns.index, columns.padding, call.columns[0].padding, strict=True
                )
            )
            for columns in call.columns
        )

    @property
    def _prefilled(self) -> _Call:
        if self._call is None or len(self._call.columns) < self._stack.num_layers:
            raise InvalidInputError("no prefill has run since begin; run the model first.")
        return self._call

    @contextmanager
    def hooks(self, text_model: nn.Module) -> Iterator[None]:
        """Installs the hooks, and takes them away whatever happens.

        Without a layer at which something happens none are installed.

        Raises:
            InvalidInputError: a model that is not built as `LayerReducer` says.
        """
        layers = self._checked_layers(text_model)
        with ExitStack() as stack:
            if self._stack.layers:
                rotary: Any = text_model.rotary_emb
                before_rotary = rotary.register_forward_pre_hook(self._see_rotary, with_kwargs=True)
                stack.callback(before_rotary.remove)
                for index, layer in enumerate(layers):
                    self._hook_layer(stack, index, layer, text_model)
            yield

    def _checked_layers(self, text_model: nn.Module) -> list[Any]:
        layers = list(getattr(text_model, "layers", ()))
        has_parts = hasattr(text_model, "rotary_emb") and layers
        if not has_parts or not all(hasattr(layer, "self_attn") for layer in layers):
            raise InvalidInputError(
                f"{type(text_model).__name__} cannot be hooked: a text model needs layers with a "
                "self_attn each, and a rotary_emb; pass the language model itself."
            )
        if len(layers) != self._stack.num_layers:
            raise InvalidInputError(
                f"the stages were prepared for {self._stack.num_layers} layers, and "
                f"{type(text_model).__name__} has {len(layers)}."
            )
        return layers

    def _hook_layer(self, stack: ExitStack, index: int, layer: Any, text_model: nn.Module) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._before_layer(index, text_model, args, kwargs)

        stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        if index in self._stack.layers and self._stack.reads_attention(index):
            stack.enter_context(looking_at(layer.self_attn, self._show, self._is_prefill))

    def _is_prefill(self) -> bool:
        return self._call is not None and self._call.is_prefill

    def _show(self, query: Tensor, key: Tensor, scaling: float) -> None:
        self._current().attended = Attended(True, query, key, scaling)

    def _current(self) -> _Call:
        if self._call is None:
            raise InvalidInputError(
                "the model ran with stages between its layers, and nobody said where its visual "
                "tokens are; call begin(layouts, padding) before each prompt."
            )
        return self._call

    def _see_rotary(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._current()
        if call.position_ids is None:
            call.position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]

    def _before_layer(
        self, index: int, text_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call, kwargs = self._current(), dict(kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
        if index == 0:
            _begin_forward(call, hidden, has_cache=cache is not None)
        if call.is_prefill:
            reduced = self._reduced(call, index, hidden, text_model)
            if args:
                args = (reduced, *args[1:])
            else:
                kwargs["hidden_states"] = reduced
        columns = call.columns[index]
        if columns is call.columns[0]:
            return args, kwargs
        mask, implementation = kwargs.get("attention_mask"), _implementation(text_model)
        if call.is_prefill:
            kwargs["position_embeddings"] = call.rotary
            # Flash attention would take gaps in positions for packed sequences; nothing else reads
            # them here.
            kwargs["position_ids"] = None
            mask = prefill_mask(mask, columns, implementation, hidden.dtype)
        else:
            total = cache.get_seq_length()
            mask = decode_mask(mask, columns, call.num_columns, total, implementation, hidden.dtype)
        kwargs["attention_mask"] = mask
        return args, kwargs

    def _reduced(self, call: _Call, index: int, hidden: Tensor, text_model: Any) -> Tensor:
        """The input of layer `index` in a prefill, behind the stages of the layer in front."""
        assert call.rows is not None, "the prefill has begun"
        rows = replace(call.rows, hidden=hidden)
        call.num_scores.append((0,) * len(rows.padding))
        columns = call.columns[-1] if call.columns else Columns(rows.columns, rows.padding)
        if index - 1 in self._stack.layers:
            attended, call.attended = call.attended or Attended(is_causal=True), None
            shorter, call.num_scores[index - 1] = self._stack.reduce(rows, index - 1, attended)
            if shorter is not rows:
                rows, columns = shorter, Columns(shorter.columns, shorter.padding)
                call.rotary = text_model.rotary_emb(rows.hidden, rows.position_ids)
        call.columns.append(columns)
        is_last = index == self._stack.num_layers - 1
        call.rows = None if is_last else rows
        return rows.hidden


def _implementation(text_model: Any) -> str:
    return text_model.config._attn_implementation or "eager"


def _begin_forward(call: _Call, hidden: Tensor, *, has_cache: bool) -> None:
    """Tells a prefill from a step of decoding, and checks that it can be one."""
    num_rows, length = hidden.shape[:2]
    if call.num_columns:
        call.is_prefill = False
        if not has_cache:
            raise InvalidInputError(
                "a second forward without a cache is a new prefill; call begin(layouts, padding) "
                "before it, or use_cache=True."
            )
        if length != 1:
            raise InvalidInputError(
                f"a step of decoding has one token per row, got {length}; chunked prefill and "
                "assisted decoding do not go with stages between layers."
            )
        return
    repeats, rest = divmod(num_rows, len(call.layouts))
    layouts = [layout for layout in call.layouts for _ in range(repeats)]
    padding = [count for count in call.padding for _ in range(repeats)]
    sizes = {len(layout.is_visual) + count for layout, count in zip(layouts, padding, strict=True)}
    if rest or sizes != {length}:
        raise InvalidInputError(
            f"the model reads {num_rows} rows of {length} columns, and begin was told of rows of "
            f"{[len(layout.is_visual) for layout in call.layouts]} positions behind "
            f"{list(call.padding)} columns of padding."
        )
    positions = call.position_ids
    if positions is None:
        raise InvalidInputError("the model did not ask its rotary_emb for cosines and sines.")
    positions = positions.expand(*positions.shape[:-2], num_rows, -1)
    call.num_columns = length
    call.rows = Rows.start(hidden, positions, padding, layouts)
