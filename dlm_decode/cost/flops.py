"""FLOPs and bytes of the pieces that a model is made of.

FLOPs = 2 x multiply-accumulates of matrix products; norms, activations and rotary embeddings are
not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

__all__ = [
    "Geometry",
    "VisionGeometry",
    "Work",
    "attention_row_flops",
    "forward_flops",
    "head_flops",
    "kv_bytes_per_token",
    "layer_flops",
    "vision_flops",
]


@dataclass(frozen=True)
class VisionGeometry:
    """Sizes of a vision tower and its projector.

    Attributes:
        num_layers: encoder layers that run.
        hidden_size: tower width.
        intermediate_size: tower MLP width.
        num_heads: attention heads.
        tokens_per_tile: patches per image tile.
        patch_dim: numbers per patch (channels x height x width).
        projector_dims: widths along the projector, for example `(1152, 4096, 4096)`.
        class_tokens: further tokens per tile that the layers, but not the projector, compute.
        patches_per_token: patches that are joined to one input of the projector.
        mlp_matrices: matrices of an MLP; 3 where it is gated.
        window: patches per window, in the layers that attend within windows.
        windowed_layers: how many of the layers do.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    tokens_per_tile: int
    patch_dim: int
    projector_dims: tuple[int, ...] = ()
    class_tokens: int = 0
    patches_per_token: int = 1
    mlp_matrices: int = 2
    window: int = 0
    windowed_layers: int = 0


@dataclass(frozen=True)
class Geometry:
    """Sizes of a language model.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width D.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        intermediate_size: MLP width.
        vocab_size: rows of the head.
        vision: the vision part, `None` for text-only models.
        mlp_matrices: matrices of an MLP; 2 where it is not gated.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    vision: VisionGeometry | None = None
    mlp_matrices: int = 3


@dataclass(frozen=True)
class Work:
    """What one decoder layer does for one row.

    Attributes:
        queries: positions that it computes.
        pairs: pairs of a query and a key that the query attends to.
        values: further positions of which it computes the values only.
        scores: further pairs of a query and a key that it computes the score of, and nothing else.
    """

    queries: int
    pairs: int
    values: int = 0
    scores: int = 0


def layer_flops(geometry: Geometry, work: Work) -> int:
    """FLOPs of one decoder layer for one row."""
    query_dim = geometry.num_heads * geometry.head_dim
    kv_dim = geometry.num_kv_heads * geometry.head_dim
    projections = 2 * work.queries * geometry.hidden_size * (2 * query_dim + 2 * kv_dim)
    projections += 2 * work.values * geometry.hidden_size * kv_dim
    attention = (2 * 2 * work.pairs + 2 * work.scores) * query_dim
    mlp = 2 * work.queries * geometry.hidden_size * geometry.intermediate_size
    mlp *= geometry.mlp_matrices
    return projections + attention + mlp


def forward_flops(geometry: Geometry, queries: int, keys: int) -> int:
    """FLOPs of the decoder layers for one row, if all of them do the same.

    Args:
        geometry: model sizes.
        queries: positions that every layer computes.
        keys: positions that each of them attends to (computed plus cached).
    """
    return geometry.num_layers * layer_flops(geometry, Work(queries, queries * keys))


def attention_row_flops(geometry: Geometry, rows: int, keys: int, layers: int) -> int:
    """FLOPs of attention rows that are computed beside a forward, for one row of the batch.

    Args:
        geometry: model sizes.
        rows: queries whose attention is asked for.
        keys: positions that they attend to.
        layers: layers that are asked.
    """
    return layers * layer_flops(geometry, Work(0, 0, scores=rows * keys))


def head_flops(geometry: Geometry, positions: int) -> int:
    """FLOPs of the language-model head at `positions` positions."""
    return 2 * positions * geometry.hidden_size * geometry.vocab_size


def vision_flops(vision: VisionGeometry, tiles: int) -> int:
    """FLOPs of tower and projector for `tiles` image tiles or video frames."""
    patches, width = vision.tokens_per_tile, vision.hidden_size
    tokens = patches + vision.class_tokens
    embed = 2 * patches * vision.patch_dim * width
    weights = 4 * width * width + vision.mlp_matrices * width * vision.intermediate_size
    linear = vision.num_layers * 2 * tokens * weights
    full_layers = vision.num_layers - vision.windowed_layers
    pairs = tokens * (full_layers * tokens + vision.windowed_layers * vision.window)
    attention = 2 * 2 * pairs * width
    projected = patches // vision.patches_per_token
    projector = sum(2 * projected * a * b for a, b in pairwise(vision.projector_dims))
    return tiles * (embed + linear + attention + projector)


def kv_bytes_per_token(geometry: Geometry, bytes_per_number: int) -> int:
    """Bytes that one position's keys and values take over all layers."""
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * bytes_per_number
