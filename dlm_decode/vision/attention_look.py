"""A look at the queries and keys of one attention of a stock transformers model, as it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["Show", "looking_at"]

Show = Callable[[Tensor, Tensor, float], None]
"""Takes queries `(B, H, S, d)`, keys `(B, H_kv, S, d)`, both after rotation, and the factor."""

_LOOK = "dlm_decode_look"
# What the attention of the layer that is running is shown to, and what it really is.
_looking: ContextVar[tuple[Show, str]] = ContextVar("looking")


def _look(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The model's own attention, and a look at its queries and keys."""
    show, implementation = _looking.get()
    scaling = kwargs.get("scaling")
    show(query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    run = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)  # type: ignore[arg-type]
    return run(module, query, key, value, *args, **kwargs)


@contextmanager
def looking_at(attention: Any, show: Show, is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Calls `show` in every run of `attention` for which `is_wanted()` holds.

    One attention can be looked at by one caller at a time.

    Args:
        attention: a `self_attn` of a decoder layer.
        show: see `Show`.
        is_wanted: asked before each run.
    """
    AttentionInterface.register(_LOOK, _look)
    undo: list[Callable[[], None]] = []

    def restore(*_: Any) -> None:
        while undo:
            undo.pop()()

    def before(*_: Any) -> None:
        if not is_wanted():
            return
        config = attention.config
        own = config._attn_implementation
        token = _looking.set((show, own))

        def put_back() -> None:
            config._attn_implementation = own
            _looking.reset(token)

        undo.append(put_back)
        # Only while this one attention runs: the mask is made, and the others have theirs.
        config._attn_implementation = _LOOK

    hooks = (
        attention.register_forward_pre_hook(before),
        attention.register_forward_hook(restore, always_call=True),
    )
    try:
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()
