"""The way of autoregressive models: one position after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from dlm_decode.errors import InvalidInputError

__all__ = ["Autoregressive"]


@dataclass(frozen=True)
class Autoregressive:
    """Stands for left-to-right decoding in `AutoregressiveVlm.generate`.

    There is nothing to decide in a step, so it is not registered among the samplers, which decide
    that for diffusion models.
    """

    name: ClassVar[str] = "autoregressive"

    def start(self, context: Any) -> NoReturn:
        """Refuses: the model is a diffusion model."""
        raise InvalidInputError(
            "sampler 'autoregressive' decodes left to right, and this is a diffusion model; use "
            "one of dlm_decode.samplers.names()."
        )

    def step(self, context: Any, state: Any) -> NoReturn:
        """Refuses likewise."""
        self.start(context)
