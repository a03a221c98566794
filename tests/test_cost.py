"""The cost model against counting by hand and against what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_models import fastdllm
from torch.utils.flop_counter import FlopCounterMode

import dlm_decode
from dlm_decode.cli import main
from dlm_decode.cost import (
    Geometry,
    VisionGeometry,
    Work,
    forward_flops,
    head_flops,
    kv_bytes_per_token,
    layer_flops,
    vision_flops,
)
from dlm_decode.cost.geometries import LLADA_8B


def test_flops_equal_those_that_torch_counts():
    model = fastdllm()
    model.config._attn_implementation = "eager"  # torch does not count its fused CPU attention
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = model.hidden_states(torch.randn(1, 23, 64), torch.arange(23)[None])
        model.logits(hidden[0, :5])
    geometry = model.geometry
    assert counter.get_total_flops() == forward_flops(geometry, 23, 23) + head_flops(geometry, 5)


def test_vision_flops_equal_those_that_torch_counts(checkpoint):
    vlm: Any = dlm_decode.load(checkpoint)
    vlm.model.model.vision_tower.vision_tower.vision_model.config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        vlm.model.encode_tiles(torch.zeros(3, 3, 32, 32))
    assert counter.get_total_flops() == vision_flops(vlm.model.geometry.vision, 3)


def test_cached_forward_attends_to_more_than_it_feeds():
    geometry = Geometry(1, 4, 2, 1, 2, 8, 10)
    per_query = 2 * 4 * (2 * 4 + 2 * 2) + 3 * 2 * 4 * 8
    assert forward_flops(geometry, 3, 7) == 3 * per_query + 4 * 3 * 7 * 4
    more = layer_flops(geometry, Work(3, 21, values=5, scores=6))
    assert more == forward_flops(geometry, 3, 7) + 5 * 2 * 4 * 2 + 6 * 2 * 4
    assert kv_bytes_per_token(geometry, 2) == 2 * 1 * 1 * 2 * 2


def test_vision_without_projector():
    vision = VisionGeometry(1, 4, 8, 2, 5, 12)
    assert vision_flops(vision, 2) == 2 * vision_flops(vision, 1)


def test_text_only_share_lies_where_the_paper_puts_it(capsys):
    rho = forward_flops(LLADA_8B, 188, 188) / forward_flops(LLADA_8B, 3815, 3815)
    assert 0.03 < rho < 0.10
    assert main(["cost"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    shares = [float(line.split()[-1].rstrip("%")) for line in lines]
    assert len(shares) == 6
    assert min(shares) < 3
    assert main(["cost", "--text", "0"]) == 2


def test_summary_of_a_call(vlm):
    out = vlm.generate(["what is this ?", "is there a red star ?"], stop=False)
    assert out.cost.flops == sum(out.cost.row_flops)
    assert out.cost.baseline_flops == sum(out.cost.row_baseline_flops)
    assert out.cost.row_forwards == ({"FULL": 8}, {"FULL": 8})
    assert out.cost.to_dict()["forwards"] == {"FULL/full": 16}
    assert out.cost.relative == pytest.approx(1.0)
