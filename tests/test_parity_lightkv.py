"""LightKV's merging against the published module: weights, survivors and states (golden data)."""

from __future__ import annotations

import json

import pytest
import torch
from golden_models import GOLDEN
from safetensors import safe_open
from text_models import layout

from dlm_decode.vision.inside import LayerView
from dlm_decode.vision.lightkv import LightKV, softmax_guidance

CASES = sorted(path.stem for path in (GOLDEN / "lightkv").glob("*.safetensors"))


class Scored(LayerView):
    """A layer whose scores are given, for text keys and all queries."""

    def scores(self, queries, keys):
        assert torch.equal(queries, torch.arange(len(self.hidden)))
        assert torch.equal(keys, (~self.layout.is_visual).nonzero()[:, 0])
        return self.queries


def load(case):
    with safe_open(GOLDEN / "lightkv" / f"{case}.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["meta"])


def segments(spans, length):
    """Lengths of text, image, text, ... from inclusive image spans."""
    parts, end = [], 0
    for first, last in spans:
        parts += [first - end, last + 1 - first]
        end = last + 1
    return [*parts, length - end]


def test_number_of_cases():
    assert len(CASES) == 7


@pytest.mark.parametrize("case", CASES)
def test_merging(case):
    golden, meta = load(case)
    hidden, spans = golden["hidden_in"], meta["img_spans_inclusive"]
    count = len(meta["windows"])
    stage = LightKV(tuple(range(count)), tuple(meta["windows"]), tuple(meta["ratios"]))
    for index in range(count):
        view = Scored(
            layer=index,
            num_layers=count + 1,
            hidden=hidden,
            layout=layout(*segments(spans, len(hidden))),
            position_ids=torch.arange(len(hidden)),
            is_masked=torch.zeros(len(hidden), dtype=torch.bool),
            is_causal=True,
            queries=golden[f"stage{index}.logits_text_cols"],
        )
        weights = softmax_guidance(view.queries)[view.visual]
        torch.testing.assert_close(
            weights, golden[f"stage{index}.xi_image_rows"], rtol=0, atol=1e-5
        )
        reduction = stage.reduce(view)
        kept_name, num_images = f"stage{index}.kept_index_sorted", len(spans)
        if kept_name not in golden:
            assert reduction is None
            assert torch.equal(golden[f"stage{index}.hidden_out"], hidden)
            continue
        visual, ids = view.layout.is_visual[reduction.index], view.layout.image_ids
        starts = torch.tensor([span[0] for span in spans])
        kept = reduction.index[visual] - starts[ids[reduction.index[visual]]]
        assert torch.equal(kept.view(num_images, -1), golden[kept_name])
        torch.testing.assert_close(
            reduction.hidden, golden[f"stage{index}.hidden_out"], rtol=0, atol=1e-5
        )
        assert torch.equal(reduction.position_ids, torch.arange(len(reduction.index)))
        hidden, spans = reduction.hidden, meta["spans_after_each_stage"][index]
        own = view.layout.picked(reduction.index).image_ids
        assert spans == [
            [int(place[0]), int(place[-1])]
            for place in ((own == number).nonzero()[:, 0] for number in range(num_images))
        ]
        expected = stage.keeps(index, int(view.layout.is_visual.sum()), num_images)
        assert int(visual.sum()) == expected
