"""Stage A of the autoregressive twin: a CLIP tower whose class token has something to say."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

from dlm_decode.eval.scenes import COLOURS
from dlm_decode.training.data import NAMES, ScenePool, pixels_of
from dlm_decode.training.tower import (
    VISION_CONFIG,
    PatchReader,
    patch_accuracy,
    patch_loss,
    patch_targets,
)

__all__ = ["ClipPatchReader"]

_NUM_CELLS = 9
_MOST_OBJECTS = 9
_LOOK_WEIGHT = 0.3
_SCENE_HEADS = (len(NAMES), len(COLOURS), _NUM_CELLS, _MOST_OBJECTS + 1)


class ClipPatchReader(PatchReader):
    """A CLIP tower with the heads of `PatchReader`, and others on its class token.

    The latter read which names and colours are in the picture, which cells are taken and how many
    objects there are. That alone makes the class token look at objects in the first layers only;
    what it knows by then it need not look for later. Pruning methods rank patches by its attention
    in the last layer that features pass, so where it looks there is taught as well.
    """

    tower: CLIPVisionModel

    def __init__(self) -> None:
        super().__init__()
        width = VISION_CONFIG["hidden_size"]
        self.scene_heads = nn.ModuleList([nn.Linear(width, size) for size in _SCENE_HEADS])

    def _tower(self) -> nn.Module:
        config = CLIPVisionConfig(**VISION_CONFIG, hidden_act="gelu_pytorch_tanh")
        return CLIPVisionModel(config)

    @torch.no_grad()
    def take_over(self, reader: PatchReader, pool: ScenePool) -> None:
        """Begins with what the SigLIP tower of a trained `tiny` knows of patches.

        CLIP normalises its embeddings and has no bias on patches; scale and bias are moved to where
        it has them, which is nearly the same function.

        Args:
            reader: of that tower.
            pool: scenes on which the size of the embeddings is measured.
        """
        siglip: Any = reader.tower.get_submodule("vision_tower.vision_model")
        tower: Any = self.tower
        ours, theirs = tower.embeddings, siglip.embeddings
        ours.patch_embedding.weight.copy_(theirs.patch_embedding.weight)
        ours.class_embedding.mul_(0.02)
        ours.position_embedding.weight[0] = 0
        places = theirs.position_embedding.weight + theirs.patch_embedding.bias
        ours.position_embedding.weight[1:] = places
        embeddings = ours(pixels_of(pool.images[:128]))[:, 1:]
        tower.pre_layrnorm.weight.fill_(embeddings.std(-1).mean())
        tower.pre_layrnorm.bias.fill_(embeddings.mean())
        for ours, theirs in zip(tower.encoder.layers[:-1], siglip.encoder.layers, strict=True):
            ours.load_state_dict(theirs.state_dict())
        for ours, theirs in zip(self.heads, reader.heads, strict=True):
            ours.load_state_dict(theirs.state_dict())

    def states(self, pixels: Tensor) -> Tensor:
        """`(n, 145, 96)` states behind the last layer but one, the class token first."""
        tower: Any = self.tower
        return tower.encoder.layers[-2](self._entering(pixels), None)

    def _entering(self, pixels: Tensor) -> Tensor:
        """States before the last layer but one."""
        tower: Any = self.tower
        states = tower.pre_layrnorm(tower.embeddings(pixels))
        for layer in tower.encoder.layers[:-2]:
            states = layer(states, None)
        return states

    def features(self, pixels: Tensor) -> Tensor:
        """States of the patches, as `vision_feature_layer=-2` takes them."""
        return self.states(pixels)[:, 1:]

    def loss(self, pool: ScenePool, rows: np.ndarray) -> Tensor:
        """That of the patches, of what the class token says, and of where it looks."""
        tower: Any = self.tower
        entering = self._entering(pixels_of(pool.images[rows]))
        states = tower.encoder.layers[-2](entering, None)
        patches = patch_loss(self._patch_logits(states[:, 1:]), patch_targets(pool, rows))
        scene = self._scene_loss(states[:, 0], pool, rows)
        return patches + scene + _LOOK_WEIGHT * self.look_loss(entering, pool, rows)

    def look_loss(self, states: Tensor, pool: ScenePool, rows: np.ndarray) -> Tensor:
        """How far the class token's look is from the objects, as a cross-entropy.

        Its look is its attention to patches in the last layer that features pass, the mean over
        heads. An object's patches are wanted, the one at its centre most.

        Args:
            states: `(n, 145, 96)` that enter this layer.
            pool: scenes.
            rows: which of them.
        """
        tower: Any = self.tower
        layer = tower.encoder.layers[-2]
        attention, normed = layer.self_attn, layer.layer_norm1(states)
        shape = (len(states), -1, attention.num_heads, attention.head_dim)
        queries = attention.q_proj(normed[:, :1]).view(shape).transpose(1, 2)
        keys = attention.k_proj(normed).view(shape).transpose(1, 2)
        look = (queries @ keys.mT * attention.scale).softmax(-1).mean(1)[:, 0, 1:]
        wanted = torch.from_numpy((pool.names[rows] < len(NAMES)) + 3.0 * pool.is_anchor[rows])
        wanted = (wanted / wanted.sum(1, keepdim=True).clamp_min(1)).float()
        return -(wanted * look.clamp_min(1e-6).log()).sum(1).mean()

    def _scene_loss(self, state: Tensor, pool: ScenePool, rows: np.ndarray) -> Tensor:
        *present, number = [head(state) for head in self.scene_heads]
        *wanted, count = _scene_targets(pool, rows)
        losses = [
            functional.binary_cross_entropy_with_logits(scores, target)
            for scores, target in zip(present, wanted, strict=True)
        ]
        return torch.stack(losses).sum() + functional.cross_entropy(number, count)

    @torch.no_grad()
    def accuracy(self, pool: ScenePool) -> dict[str, float]:
        """As `patch_accuracy`, and the shares of what the class token says rightly."""
        hits: list[list[Tensor]] = [[] for _ in _SCENE_HEADS]
        for start in range(0, len(pool), 128):
            rows = np.arange(start, min(start + 128, len(pool)))
            state = self.states(pixels_of(pool.images[rows]))[:, 0]
            *present, number = [head(state) for head in self.scene_heads]
            *wanted, count = _scene_targets(pool, rows)
            for place, (scores, target) in enumerate(zip(present, wanted, strict=True)):
                hits[place].append(((scores > 0) == target.bool()).flatten())
            hits[-1].append(number.argmax(-1) == count)
        shares = [round(float(torch.cat(parts).float().mean()), 4) for parts in hits]
        keys = ("cls_name", "cls_colour", "cls_cell", "cls_count")
        return patch_accuracy(self, pool) | dict(zip(keys, shares, strict=True))


def _scene_targets(pool: ScenePool, rows: np.ndarray) -> list[Tensor]:
    """Presence `(n, classes)` of names, colours and objects in cells, then their number `(n,)`."""
    names = torch.zeros(len(rows), len(NAMES))
    colours = torch.zeros(len(rows), len(COLOURS))
    cells = torch.zeros(len(rows), _NUM_CELLS)
    for place, row in enumerate(rows):
        for item in pool.scenes[row].objects:
            names[place, NAMES.index(item.name)] = 1
            colours[place, list(COLOURS).index(item.colour)] = 1
            cells[place, item.cell] = 1
    return [names, colours, cells, cells.sum(1).long()]
