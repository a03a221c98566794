"""What decoding asks of every diffusion model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dlm_decode.cache.base import Memory
from dlm_decode.canvas import IMAGE_TOKEN_ID, Prompt
from dlm_decode.cost import Geometry
from dlm_decode.errors import InvalidInputError
from dlm_decode.models.attention import RowProbe
from dlm_decode.models.special_ids import SpecialIds, special_ids_of

if TYPE_CHECKING:
    from dlm_decode.vision.inside_run import InsideForward

__all__ = ["DiffusionModel"]


class DiffusionModel(PreTrainedModel):
    """A masked-diffusion language model with an optional vision part.

    Subclasses set `model` and `lm_head` and implement `hidden_states` and `geometry`; multimodal
    ones override `encode_prompt`. B rows, S sequence length, D hidden size, V vocabulary, P prompt
    length.
    """

    shift_logits = False
    """Whether logits at position i belong to the token at i + 1."""

    num_valid_tokens: int | None = None
    """Ids from here on are no tokens: they are never proposed and do not enter the softmax."""

    official_preset = "official"
    """Which of `PRESETS` the model's own program is."""

    default_settings: ClassVar[Mapping[str, Any]] = {}
    """What `Settings` the model's own evaluation uses where they are not the usual ones."""

    lm_head: nn.Module

    @classmethod
    def claims(cls, raw: Mapping[str, Any], name: str = "") -> bool:
        """Whether this class reads a `config.json` that bears another class's model type.

        Args:
            raw: the file's content.
            name: last part of the folder's path or of the hub id; the last two of a
                `checkpoint-...` folder.
        """
        return False

    @property
    def special_ids(self) -> SpecialIds:
        """Special ids, from the config or the official ones."""
        return special_ids_of(self.config)

    @property
    def geometry(self) -> Geometry:
        """Sizes for the cost model."""
        raise NotImplementedError(f"{type(self).__name__} must say its geometry")

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings `(..., D)` of ids `(...)`."""
        return self.get_input_embeddings()(ids)

    def hidden_states(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        key_mask: Tensor | None = None,
        memory: Memory | None = None,
        probe: RowProbe | None = None,
        inside: InsideForward | None = None,
    ) -> Tensor:
        """States after the final norm.

        Args:
            inputs_embeds: `(B, S, D)`; with a memory possibly a part of the sequence.
            position_ids: `(B, S)` rotary positions.
            key_mask: `(B, K)` bool, `True` at real positions; `None` when nothing is padded. K is S
                without a memory, and else the length of the whole sequence.
            memory: runs the layers against what a cache policy keeps.
            probe: collects attention rows of the layers that it asks about.
            inside: drops or merges visual tokens between layers; asked before each of them.

        Returns:
            `(B, S, D)`; rows at padded positions are meaningless. With `inside`, S is what is left
            at the last layer: the states of all text, at their distance from the right.
        """
        raise NotImplementedError(f"{type(self).__name__} must run its layers")

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `(N, V)` of states `(N, D)`, in the head's dtype."""
        return self.lm_head(hidden)

    def encode_prompt(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | Sequence[Tensor] | None = None,
        image_sizes: Sequence[tuple[int, int]] | None = None,
        modalities: Sequence[str] | None = None,
    ) -> Prompt:
        """One row's prompt; text only here.

        Args:
            input_ids: `(P,)` ids.
            pixel_values: must be `None` for a text-only model.
            image_sizes: likewise.
            modalities: ignored without pixels.

        Raises:
            InvalidInputError: pixels or image placeholders for a model that has no vision part, or
                ids outside the vocabulary.
        """
        if pixel_values is not None and len(pixel_values):
            raise InvalidInputError(
                f"{type(self).__name__} is a text-only model and cannot read pixel_values."
            )
        num_slots = int((input_ids == IMAGE_TOKEN_ID).sum())
        if num_slots:
            raise InvalidInputError(
                f"the prompt has {num_slots} image placeholders, and no image was given."
            )
        self.check_ids(input_ids)
        return Prompt(
            embeds=self.embed(input_ids),
            ids=input_ids,
            is_visual=torch.zeros_like(input_ids, dtype=torch.bool),
        )

    def check_ids(self, ids: Tensor) -> None:
        """Raises `InvalidInputError` for ids outside the vocabulary; placeholders are fine."""
        table: Any = self.get_input_embeddings()
        size = table.weight.shape[0]
        wrong = ids[(ids >= size) | ((ids < 0) & (ids != IMAGE_TOKEN_ID))]
        if len(wrong):
            raise InvalidInputError(
                f"ids {wrong.unique().tolist()[:5]} are outside the vocabulary of {size}; was "
                "another tokenizer used?"
            )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Writes config and weights, always under the key names of our modules.

        Transformers would translate them back to the names of the folder they came from, which do
        not go with the config fields that it writes. Arguments are those of transformers.
        """
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: diffusion models are not decoded left to right."""
        raise InvalidInputError(
            "transformers' generate decodes left to right; use dlm_decode.load(...).generate(...), "
            "or "
            "dlm_decode.DiffusionVlm(model, processor).generate(...) for a model that is loaded "
            "already."
        )
