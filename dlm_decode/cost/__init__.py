"""The one cost model: analytic FLOPs and KV bytes, of what ran and of what papers report.

The language-model layers, the head and the vision encoder are separate lines, because papers count
different subsets: LOWN's relative cost counts language-model layers only.
"""

from __future__ import annotations

from dlm_decode.cost.flops import (
    Geometry,
    VisionGeometry,
    Work,
    attention_row_flops,
    forward_flops,
    head_flops,
    kv_bytes_per_token,
    layer_flops,
    vision_flops,
)
from dlm_decode.cost.meter import Cost, CostMeter, Forward, Routing

__all__ = [
    "Cost",
    "CostMeter",
    "Forward",
    "Geometry",
    "Routing",
    "VisionGeometry",
    "Work",
    "attention_row_flops",
    "forward_flops",
    "head_flops",
    "kv_bytes_per_token",
    "layer_flops",
    "vision_flops",
]
