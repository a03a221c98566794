"""FastV's and LightKV's rules on single layers: who ranks, who stays, what merging preserves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import layout

from dlm_decode import vision
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.vision.fastv import FastV, query_rows
from dlm_decode.vision.inside import LayerView, RowLayout
from dlm_decode.vision.lightkv import LightKV
from dlm_decode.vision.matching import match, merge_shares, num_merged, square_windows

QUICK = settings(max_examples=30, deadline=None)


def view_of(row: RowLayout, *, layer=0, num_layers=4, num_masked=0, is_causal=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    length = len(row.is_visual)
    is_masked = torch.arange(length) >= length - num_masked
    return LayerView(
        layer=layer,
        num_layers=num_layers,
        hidden=torch.randn(length, 8, generator=generator),
        layout=row,
        position_ids=torch.arange(length) * 2,
        is_masked=is_masked,
        is_causal=is_causal,
        queries=torch.randn(4, length, 6, generator=generator),
        keys=torch.randn(2, length, 6, generator=generator),
        scaling=6**-0.5,
    )


def grid_layout(rows, columns, *, before=2, behind=3, has_newline=False):
    """One image with a grid, and a newline vector behind each row on request."""
    width = columns + has_newline
    row = layout(before, rows * width, behind)
    parts, cells = row.parts.clone(), row.cells.clone()
    place = torch.arange(rows * width)
    is_cell = place % width < columns
    parts[before + place[is_cell]] = 0
    cells[before + place[is_cell]] = torch.stack([place // width, place % width], -1)[is_cell]
    return RowLayout(row.is_visual, row.image_ids, parts, cells)


@pytest.mark.parametrize(
    ("rows", "is_causal", "num_masked", "expected"),
    [
        (None, True, 0, [13]),
        (None, False, 2, [12, 13]),
        ("last", False, 2, [13]),
        ("text_mean", True, 0, [9, 10, 11, 12, 13]),
        ("text_mean", False, 2, [9, 10, 11]),
        ("text_mean", False, 5, [0, 1, 2]),
        ("mask_mean", False, 4, [10, 11, 12, 13]),
    ],
)
def test_whose_attention_ranks(rows, is_causal, num_masked, expected):
    view = view_of(layout(3, 6, 5), is_causal=is_causal, num_masked=num_masked)
    assert query_rows(view, rows).tolist() == expected


def test_attention_is_that_of_the_whole_map():
    for is_causal in (True, False):
        view = view_of(layout(3, 6, 5), is_causal=is_causal)
        assert view.queries is not None and view.keys is not None
        scores = view.queries @ view.keys.repeat_interleave(2, 0).transpose(1, 2) * 6**-0.5
        if is_causal:
            scores += torch.full((14, 14), float("-inf")).triu(1)
        rows = torch.tensor([5, 13])
        assert torch.allclose(view.attention(rows), scores.softmax(-1)[:, rows], atol=1e-6)
        assert view.num_scores == 28


@QUICK
@given(
    first=st.integers(1, 12), second=st.integers(0, 12), ratio=st.floats(0.01, 1.0),
    seed=st.integers(0, 5),
)  # fmt: skip
def test_each_image_keeps_its_strongest(first, second, ratio, seed):
    row = layout(2, first, 1, second, 3)
    view = view_of(row, seed=seed)
    reduction = FastV(1, ratio).reduce(view)
    received = view.attention(torch.tensor([len(row.is_visual) - 1])).mean(dim=(0, 1))
    index = reduction.index
    assert index.tolist() == sorted(set(index.tolist()))
    assert set(index.tolist()) >= set((~row.is_visual).nonzero()[:, 0].tolist())
    for number, count in enumerate((first, second)):
        kept = index[row.image_ids[index] == number]
        gone = set((row.image_ids == number).nonzero()[:, 0].tolist()) - set(kept.tolist())
        assert len(kept) == (min(count, max(1, round(count * ratio))) if count else 0)
        if gone and len(kept):
            assert received[kept].min() >= received[list(gone)].max()
    assert torch.equal(reduction.hidden, view.hidden[index])
    assert torch.equal(reduction.position_ids, index * 2)


def test_ties_go_to_the_front():
    view = view_of(layout(1, 6, 1))
    view.keys[:] = 0.0
    assert FastV(1, 0.5).reduce(view).index.tolist() == [0, 1, 2, 3, 7]


@QUICK
@given(
    count=st.integers(1, 70), windows=st.integers(1, 4), ratio=st.floats(0, 0.5),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_matching_in_windows_is_matching_window_by_window(count, windows, ratio, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, labels = torch.randn(count, 5, generator=generator), square_windows(count, windows)
    target = match(hidden, labels, ratio)
    for label in labels.unique().tolist():
        places = (labels == label).nonzero()[:, 0]
        sources, partners = places[0::2], places[1::2]
        number = num_merged(len(places), ratio)
        assert number == min(int(ratio * len(places)), len(places) // 2)
        cosine = torch.nn.functional.cosine_similarity(
            hidden[sources][:, None], hidden[partners][None], dim=-1
        )
        expected = {int(place): int(place) for place in places}
        best = cosine.max(dim=1) if len(partners) else None
        for source in best.values.topk(number).indices.tolist() if best is not None else ():
            expected[int(sources[source])] = int(partners[best.indices[source]])
        assert {int(place): int(target[place]) for place in places} == expected


@QUICK
@given(count=st.integers(8, 60), ratio=st.floats(0, 0.5), seed=st.integers(0, 9))
def test_merging_conserves_weighted_mass(count, ratio, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, generator=generator) + 0.01
    target = match(hidden, square_windows(count, 2), ratio)
    shares = merge_shares(target, weights)
    stays = target == torch.arange(count)
    assert torch.equal(target[target], target), "nobody is merged into a token that is gone"
    for place in stays.nonzero()[:, 0].tolist():
        group = (target == place).nonzero()[:, 0]
        assert shares[group].sum().item() == pytest.approx(1, abs=1e-6)
        assert torch.allclose(shares[group] * weights[group].sum(), weights[group], atol=1e-5)


@pytest.mark.parametrize("guidance", ["query_softmax", "causal_attention", "uniform", "random"])
@pytest.mark.parametrize("grid", ["fake_square", "cells"])
def test_one_stage_of_lightkv(guidance, grid):
    view = view_of(grid_layout(6, 7, has_newline=grid == "cells"), layer=1)
    stage = LightKV(1, 2, 0.5, guidance, grid)
    reduction = stage.reduce(view)
    is_visual = view.layout.is_visual[reduction.index]
    assert torch.equal(reduction.hidden[~is_visual], view.hidden[reduction.index][~is_visual]), (
        "text is untouched, bit for bit"
    )
    if grid == "cells":
        newlines = (view.layout.is_visual & (view.layout.parts < 0)).nonzero()[:, 0]
        assert set(newlines.tolist()) <= set(reduction.index.tolist())
        assert int(is_visual.sum()) == 6 + 2 * (6 + 5)  # newlines, and windows of 12 and 9
    else:
        assert int(is_visual.sum()) == stage.keeps(1, 42, 1)
    lowest, highest = view.hidden.amin(0), view.hidden.amax(0)
    assert bool(((reduction.hidden >= lowest - 1e-5) & (reduction.hidden <= highest + 1e-5)).all())
    assert torch.allclose(reduction.again(view.hidden), reduction.hidden)
    double = reduction.again(2 * view.hidden)
    assert torch.allclose(double, 2 * reduction.hidden, atol=1e-6)
    assert torch.equal(reduction.position_ids, torch.arange(len(reduction.index)))
    again = stage.reduce(view)
    assert torch.equal(again.hidden, reduction.hidden), "random weights come from the seed"
    original = LightKV(1, 2, 0.5, guidance, grid, "original").reduce(view)
    assert torch.equal(original.position_ids, original.index * 2)


def test_windows_of_cells_lie_in_the_picture():
    """Tokens are merged within their quarter of it, and so is what is left of them."""
    row = grid_layout(8, 8)
    view = view_of(row)
    for turn in range(2):
        reduction = LightKV(0, 2, 0.25, "uniform", "cells").reduce(view)
        target = reduction.index[reduction.groups]
        is_merged = target != torch.arange(len(target))
        assert int(is_merged.sum()) == (16, 12)[turn]
        for axis in range(2):
            half = view.layout.cells[:, axis] // 4
            assert torch.equal(half[is_merged], half[target[is_merged]])
        view = view.behind(reduction)


@pytest.mark.parametrize("axes", [(), (3,)])
def test_positions_on_every_axis(axes):
    view = view_of(layout(2, 32, 2))
    view.position_ids = view.position_ids.expand(*axes, -1)
    reduction = LightKV(0, 2, 0.25).reduce(view)
    expected = torch.arange(len(reduction.index)).expand(*axes, -1)
    assert torch.equal(reduction.position_ids, expected)


def test_too_small_an_image_stops_the_layer():
    """One image of 31 tokens stops four windows, also of an image that is large enough."""
    assert LightKV(0, 2, 0.5).reduce(view_of(layout(2, 31, 1, 60, 2))) is None
    assert LightKV(0, 2, 0.5).reduce(view_of(layout(2, 32, 1, 60, 2))) is not None
    assert LightKV(0, 2, 0.5).keeps(0, 62, 2) == 62
    assert LightKV(0, 2, 0.5).keeps(0, 64, 2) == 2 * (5 + 5 + 4 + 3)  # of windows of 9, 9, 8 and 6


def test_schedules():
    assert LightKV().layers(32) == (12, 18, 24)
    assert LightKV().layers(4) == (1, 2)
    assert LightKV().layers(2) == (0,)
    assert LightKV("12-17-22", "6-4-2").layers(28) == (12, 17, 22)
    assert LightKV((0, 2), (1, 2), "0.5-0.0").layers(4) == (0,)
    assert vision.make("lightkv@llava-1.5-13b") == LightKV((15, 23, 31), (4, 2, 1))
    assert vision.make("lightkv:at_layers=3,windows=2,ratios=0.3") == LightKV((3,), (2,), (0.3,))
    left = 576
    for layer in (15, 23, 31):
        left = vision.make("lightkv@llava-1.5-13b").keeps(layer, left, 1)
    assert left == 73
    assert LightKV().keeps(12, 576, 1) is None
    assert LightKV().keeps(12, 576, 1, 32) == 288


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fastv:k=0", "k must be a whole number of at least 1, got 0"),
        ("fastv:keep_ratio=0", "keep_ratio must be above 0"),
        ("fastv:rows=first", "unknown rows 'first'"),
        ("fastv:when=twice", "unknown when 'twice'"),
        ("lightkv:at_layers=5-3-1", "at_layers must ascend"),
        ("lightkv:at_layers=a-b", "must be whole numbers"),
        ("lightkv:windows=4-2", "windows has 2 entries for 3 layers"),
        ("lightkv:windows=0", "windows must be at least 1"),
        ("lightkv:windows=1.5", "must be whole numbers"),
        ("lightkv:ratios=0.6", "between 0 and 0.5"),
        ("lightkv:guidance=softmax", "unknown guidance"),
        ("lightkv:seed=3", "goes with guidance='random'"),
        ("pyramiddrop:depths=0-2", "depths must ascend, counted from 1"),
        ("pyramiddrop:keep_ratios=0.5-0.6-0.1", "keep_ratios must descend"),
        ("pyramiddrop:rows=none_such", "unknown rows"),
        ("dart:visual_pivots=0", "visual_pivots must be a whole number"),
    ],
)
def test_knobs_that_cannot_work(spec, message):
    with pytest.raises((InvalidInputError, UnknownNameError), match=message):
        vision.make(spec)


def test_cells_must_be_known():
    with pytest.raises(InvalidInputError, match="use grid='fake_square'"):
        LightKV(0, 1, grid="cells").reduce(view_of(layout(2, 30, 2)))


def test_a_pyramid():
    """Cumulative shares of what entered, each time the strongest."""
    stage = vision.make("pyramiddrop:depths=1-2-3")
    view = view_of(layout(3, 40, 5))
    assert stage.layers(5) == (0, 1, 2)
    assert vision.make("pyramiddrop").layers(32) == (7, 15, 23)
    assert vision.make("pyramiddrop").layers(2) == (0,)
    for layer, count in enumerate((20, 10, 5)):
        view.layer, view.num_layers = layer, 5
        before = len(view.visual)
        assert stage.keeps(layer, before, 1) == count
        received = view.attention(torch.tensor([len(view.hidden) - 1])).mean(dim=(0, 1))
        reduction = stage.reduce(view)
        kept = reduction.index[view.layout.is_visual[reduction.index]]
        best = view.visual[received[view.visual].topk(count).indices].sort().values
        assert torch.equal(kept, best)
        view = view.behind(reduction)


def test_dart_takes_what_differs_from_its_pivots():
    view = view_of(layout(3, 40, 5), num_masked=2, is_causal=False)
    size = view.keys.abs().sum(dim=(0, 2))
    visual, text = view.visual, torch.tensor([0, 1, 2, 43, 44, 45])
    pivots = [
        *visual[size[visual].topk(2).indices].tolist(),
        *text[size[text].topk(2).indices].tolist(),
    ]
    unit = torch.nn.functional.normalize(view.hidden, dim=-1)
    free, expected = set(visual.tolist()) - set(pivots), set(pivots[:2])
    for pivot in pivots:
        nearest_last = sorted(free, key=lambda place: float(unit[place] @ unit[pivot]))[:5]
        free -= set(nearest_last)
        expected |= set(nearest_last)
    stage = vision.make("dart:k=1,visual_pivots=2,text_pivots=2")
    index = stage.reduce(view).index
    assert set(index[view.layout.is_visual[index]].tolist()) == expected
    assert len(expected) == stage.keeps(0, 40, 1) == 22
