"""SpecFlow: what the paper proves of its parts, and the whole on prompts of every shape."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlm_decode.canvas import IMAGE_TOKEN_ID, Prompt, VisualSpan
from dlm_decode.errors import InvalidInputError
from dlm_decode.vision import heat_flow as flow
from dlm_decode.vision import make
from dlm_decode.vision.allocation import fractional_quotas, quotas
from dlm_decode.vision.heat_flow import diffuse, heat_step, knn_graph, normalized
from dlm_decode.vision.quadtree import cells_of, partition
from dlm_decode.vision.sinks import mean_and_residual
from dlm_decode.vision.specflow import SpecFlow

seeds = st.integers(0, 2**31)
alphas = st.floats(0, 0.95)
few = settings(max_examples=25, deadline=None)
graphs = st.fixed_dictionaries(
    {
        "num_nodes": st.integers(2, 40),
        "num_neighbors": st.integers(1, 10),
        "tau": st.floats(0.1, 50),
        "symmetry": st.sampled_from(["directed", "or", "and"]),
        "seed": seeds,
    }
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def graph_of(num_nodes, num_neighbors, tau, symmetry, seed):
    features = torch.randn(num_nodes, 5, generator=generator(seed))
    return knn_graph(features, num_neighbors, tau, symmetry)


def dense(graph):
    matrix = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    return matrix.index_put_((graph.sources, graph.targets), graph.weights)


def random_seed(num_nodes, seed):
    return normalized(torch.rand(num_nodes, generator=generator(seed), dtype=torch.float64) ** 4)


@few
@given(graphs)
def test_1_w_is_row_stochastic(knobs):
    matrix = dense(graph_of(**knobs))
    assert (matrix >= 0).all()
    assert torch.allclose(matrix.sum(-1), torch.ones(len(matrix)).double(), atol=1e-12)
    if knobs["symmetry"] == "directed":
        expected = min(knobs["num_neighbors"], len(matrix) - 1)
        assert ((matrix > 0).sum(-1) == expected).all()
        assert (matrix.diagonal() == 0).all()


@few
@given(graphs, alphas, seeds)
def test_2_mass_is_kept_without_normalising(knobs, alpha, seed):
    graph = graph_of(**knobs)
    start = energy = random_seed(graph.num_nodes, seed)
    for _ in range(4):
        energy = heat_step(energy, start, graph, alpha)
        assert (energy >= 0).all()
        assert float(energy.sum()) == pytest.approx(1, abs=1e-12)


@few
@given(graphs, alphas, seeds)
def test_3_a_step_contracts(knobs, alpha, seed):
    graph = graph_of(**knobs)
    start = random_seed(graph.num_nodes, seed)
    one, two = torch.randn(2, graph.num_nodes, generator=generator(seed), dtype=torch.float64)
    after = heat_step(one, start, graph, alpha) - heat_step(two, start, graph, alpha)
    assert after.abs().sum() <= alpha * (one - two).abs().sum() + 1e-12


@few
@given(graphs, alphas, seeds, st.integers(0, 6))
def test_4_steps_approach_the_fixed_point(knobs, alpha, seed, steps):
    graph = graph_of(**knobs)
    start, matrix = random_seed(graph.num_nodes, seed), dense(graph)
    eye = torch.eye(len(matrix), dtype=torch.float64)
    fixed = torch.linalg.solve(eye - alpha * matrix.T, (1 - alpha) * start)
    assert float(fixed.sum()) == pytest.approx(1, abs=1e-9)
    energy = diffuse(start, graph, alpha, steps)
    far = (start - fixed).abs().sum()
    assert (energy - fixed).abs().sum() <= alpha**steps * far + 1e-12
    assert torch.allclose(diffuse(start, graph, alpha, None), fixed, atol=1e-11)


def symmetric_affinity(graph, tau, features):
    unit = torch.nn.functional.normalize(features.double(), dim=-1)
    return torch.where(dense(graph) > 0, (tau * (unit @ unit.T)).exp(), 0.0)


@few
@given(seeds, st.floats(0.05, 0.9), st.sampled_from(["or", "and"]))
def test_5_the_fixed_point_minimises_the_dirichlet_objective(seed, alpha, symmetry):
    features = torch.randn(12, 5, generator=generator(seed))
    graph = knn_graph(features, 3, 2.0, symmetry)
    assume(symmetry == "or" or bool((dense(graph).diagonal() == 0).all()))
    affinity = symmetric_affinity(graph, 2.0, features)
    assert torch.allclose(affinity, affinity.T)
    degree = affinity.sum(-1)
    assert torch.allclose(dense(graph), affinity / degree[:, None], atol=1e-6)
    sources, targets = affinity.nonzero().T
    weights = (affinity / degree[:, None])[sources, targets]
    graph = flow.Graph(sources, targets, weights, 12)
    start = random_seed(12, seed)

    def objective(energy):
        gap, scaled = (energy - start) / degree, energy / degree
        rough = scaled @ (torch.diag(degree) - affinity) @ scaled
        return 0.5 * (degree * gap * gap).sum() + alpha / (2 * (1 - alpha)) * rough

    best = diffuse(start, graph, alpha, None).requires_grad_()
    value = objective(best)
    (gradient,) = torch.autograd.grad(value, best)
    assert gradient.abs().max() < 1e-9
    for number in range(5):
        shift = torch.randn(12, generator=generator(number), dtype=torch.float64)
        assert objective(best.detach() + 0.1 * shift) > value


@few
@given(seeds)
def test_6_dirichlet_energy_is_a_sum_over_edges(seed):
    features = torch.randn(10, 5, generator=generator(seed))
    affinity = symmetric_affinity(knn_graph(features, 3, 2.0, "or"), 2.0, features)
    values = torch.randn(10, generator=generator(seed), dtype=torch.float64)
    laplacian = torch.diag(affinity.sum(-1)) - affinity
    edges = 0.5 * (affinity * (values[:, None] - values).square()).sum()
    assert float(values @ laplacian @ values) == pytest.approx(float(edges), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_7_quotas_are_feasible(data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=20))
    shape = st.lists(
        st.one_of(st.just(0.0), st.floats(1e-9, 1)), min_size=len(sizes), max_size=len(sizes)
    )
    mass = data.draw(shape)
    if data.draw(st.booleans()):
        mass = [float(place == 0) for place in range(len(sizes))]
    budget = data.draw(st.integers(0, sum(sizes)))
    leftover = data.draw(st.sampled_from(["round_robin", "largest_remainder"]))
    shares = quotas(mass, sizes, budget, leftover)
    assert sum(shares) == budget
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))


def test_7_what_rounding_leaves():
    assert quotas([5, 3, 2], [9, 9, 9], 4) == [3, 1, 0]
    assert quotas([0.3, 0.3, 0.4], [9, 9, 9], 5) == [1, 1, 3]
    assert quotas([0.5, 0.26, 0.24], [9, 9, 9], 3, "largest_remainder") == [1, 1, 1]
    assert quotas([0.5, 0.26, 0.24], [9, 9, 9], 3) == [2, 1, 0]
    assert quotas([1, 0, 0], [2, 3, 3], 6) == [2, 2, 2]
    assert quotas([1] * 8, [256] * 8, 455, "largest_remainder") == [57] * 7 + [56]


@few
@given(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 6),
    st.floats(0, 2), seeds,
)  # fmt: skip
def test_8_leaves_cover_without_overlap(frames, rows, columns, min_crop, delta, seed):
    energy = torch.rand(frames, rows, columns, generator=generator(seed), dtype=torch.float64)
    numbers = torch.arange(energy.numel()).reshape(energy.shape)
    leaves = partition(energy, delta * float(energy.mean()), min_crop)
    inside = torch.cat([cells_of(leaf, numbers) for leaf in leaves])
    assert inside.sort().values.equal(numbers.flatten())
    for _, (top, bottom), (left, right) in leaves:
        assert bottom - top >= min(min_crop, rows)
        assert right - left >= min(min_crop, columns)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(24, 24, 16), (16, 16, 16), (27, 27, 16), (12, 12, 4), (7, 7, 1), (20, 36, 16), (48, 48, 64),
     (7, 90, 1)],
)  # fmt: skip
def test_8_how_far_it_can_be_cut(rows, columns, expected):
    energy = torch.rand(1, rows, columns, generator=generator(0), dtype=torch.float64)
    assert len(partition(energy, 0.0, 4)) == expected
    assert len(partition(energy, math.inf, 4)) == 1
    assert len(partition(torch.ones(1, rows, columns).double(), 0.0, 4)) == 1


def test_8_only_uneven_regions_are_cut():
    energy = torch.ones(1, 16, 16, dtype=torch.float64)
    energy[0, 1, 1] = 50
    sides = [(rows, columns) for _, rows, columns in partition(energy, 0.5, 4)]
    assert sides == [
        ((0, 4), (0, 4)), ((0, 4), (4, 8)), ((4, 8), (0, 4)), ((4, 8), (4, 8)),
        ((0, 8), (8, 16)), ((8, 16), (0, 8)), ((8, 16), (8, 16)),
    ]  # fmt: skip
    clip = torch.ones(4, 8, 8, dtype=torch.float64)
    clip[3] = 9
    assert [frames for frames, _, _ in partition(clip, 0.5, 8)] == [(0, 2), (2, 3), (3, 4)]
    assert len(partition(clip, 0.5, 4)) == 4 + 8


@few
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=8), seeds)
def test_9_fractional_quotas_are_proportionally_fair(mass, seed):
    best = torch.tensor(fractional_quotas(mass, 10), dtype=torch.float64)
    weights = torch.tensor(mass, dtype=torch.float64)
    other = 10 * normalized(
        torch.rand(len(mass), generator=generator(seed), dtype=torch.float64) + 1e-3
    )
    assert float(best.sum()) == pytest.approx(10)
    assert (weights * best.log()).sum() >= (weights * other.log()).sum() - 1e-9


@few
@given(st.integers(1, 20), seeds)
def test_10_mean_and_residual(count, seed):
    pruned = torch.randn(count, 6, generator=generator(seed))
    mean, farthest = mean_and_residual(pruned)

    def spread(centre):
        return (pruned - centre).square().sum()

    direction = torch.randn(6, generator=generator(seed + 1))
    assert spread(mean) <= spread(mean + 0.01 * direction)
    radius = (pruned[farthest] - mean).norm()
    assert ((pruned - mean).norm(dim=-1) <= radius + 1e-6).all()
    assert (((pruned - mean) @ direction).abs() <= direction.norm() * radius + 1e-5).all()


def prompt_of(*pictures, seed=0, width=8, gap=2):
    """Text around pictures, each a list of sections `(rows, columns, has_newline)` and a
    modality."""
    random = generator(seed)
    spans, length = [], gap
    for number, (shapes, modality) in enumerate(pictures):
        sections, start = [], 0
        for rows, columns, has_newline in shapes:
            sections.append((start, rows, columns, has_newline))
            start += rows * (columns + has_newline)
        frames = len(shapes) if modality == "video" else 1
        spans.append(VisualSpan(length, start, number, modality, frames, tuple(sections)))
        length += start + gap
    is_visual = torch.zeros(length, dtype=torch.bool)
    for span in spans:
        is_visual[span.start : span.start + span.length] = True
    salience = torch.rand(length, generator=random) ** 6 * is_visual
    return Prompt(
        embeds=torch.randn(length, width, generator=random),
        ids=torch.where(is_visual, IMAGE_TOKEN_ID, torch.arange(length)),
        is_visual=is_visual,
        spans=tuple(spans),
        salience=salience,
        tower_keys=torch.randn(length, 4, generator=random) * is_visual[:, None],
    )


def image(rows=24, columns=24, has_newline=False):
    return [(rows, columns, has_newline)], "image"


def kept_of(prompt, out):
    """Prompt positions of the visual tokens of a prompt that kept its rotary positions."""
    assert out.ids[~out.is_visual].equal(prompt.ids[~prompt.is_visual])
    assert out.embeds[~out.is_visual].equal(prompt.embeds[~prompt.is_visual])
    assert out.next_position == prompt.length
    return out.positions()[out.is_visual]


@pytest.mark.parametrize("sinks", ["none", "mean", "both"])
def test_11_everything_kept_is_the_same_object(sinks):
    prompt = prompt_of(image(6, 5, True), image())
    for knob in ({"keep_ratio": 1.0}, {"keep_tokens": 576}):
        assert SpecFlow(**knob, sinks=sinks).before_lm(prompt) is prompt
    assert SpecFlow(keep_ratio=1.0).tower_needs == ()
    assert SpecFlow().before_lm(prompt_of()).spans == ()


def test_12_alpha_0_is_the_seed():
    prompt = prompt_of(image())
    options = {"keep_tokens": 64, "positions": "original", "sinks": "none"}
    still = SpecFlow(alpha=0.0, **options).before_lm(prompt)
    assert still.embeds.equal(SpecFlow(graph="none", **options).before_lm(prompt).embeds)
    assert not still.embeds.equal(SpecFlow(**options).before_lm(prompt).embeds)
    top = SpecFlow(graph="none", allocation="topk", **options).before_lm(prompt)
    best = prompt.salience.argsort(descending=True, stable=True)[:64].sort().values
    assert kept_of(prompt, top).equal(best)


@few
@given(st.integers(1, 34), seeds)
def test_13_kept_and_mean_conserve_the_sum(count, seed):
    prompt = prompt_of(image(5, 7), seed=seed)
    out = SpecFlow(keep_tokens=count, sinks="mean").before_lm(prompt)
    visual = out.embeds[out.is_visual]
    assert len(visual) == count + 1
    total = prompt.embeds[prompt.is_visual].sum(0)
    assert torch.allclose(visual[:-1].sum(0) + (35 - count) * visual[-1], total, atol=1e-4)


def test_sinks_follow_the_kept_tokens():
    prompt = prompt_of(image())
    out = SpecFlow(keep_tokens=64, positions="original").before_lm(prompt)
    positions = kept_of(prompt, out)
    kept, mean, residual = positions[:64], positions[64], positions[65]
    assert len(positions) == 66
    assert kept.diff().min() > 0
    assert out.embeds[out.is_visual][:64].equal(prompt.embeds[kept])
    is_pruned = prompt.is_visual.clone()
    is_pruned[kept] = False
    pruned = prompt.embeds[is_pruned]
    visual = out.embeds[out.is_visual]
    assert torch.allclose(visual[64], pruned.mean(0), atol=1e-6)
    assert visual[65].equal(pruned[(pruned - pruned.mean(0)).norm(dim=-1).argmax()])
    assert mean == is_pruned.nonzero().float().mean().round()
    assert is_pruned[residual]
    assert prompt.embeds[residual].equal(visual[65])
    renumbered = SpecFlow(keep_tokens=64).before_lm(prompt)
    assert renumbered.positions().tolist() == list(range(4 + 66))
    assert renumbered.next_position == renumbered.length
    assert renumbered.spans == (replace(prompt.spans[0], length=66, sections=()),)


@pytest.mark.parametrize(
    ("knobs", "patches", "expected"),
    [
        ({"keep_tokens": 64}, 35, 35),
        ({"keep_tokens": 34}, 35, 35),
        ({"keep_tokens": 33}, 35, 35),
        ({"keep_tokens": 10}, 35, 12),
        ({"keep_tokens": 10, "sinks_in_budget": True}, 35, 10),
        ({"keep_tokens": 1, "sinks_in_budget": True}, 35, 1),
        ({"keep_tokens": 2, "sinks_in_budget": True}, 35, 2),
        ({"keep_tokens": 2, "sinks": "mean"}, 35, 3),
        ({"keep_ratio": 0.01, "sinks": "none"}, 35, 1),
        ({"sinks": "none"}, 35, 18),
    ],
)
def test_how_many_stay(knobs, patches, expected):
    prompt = prompt_of(image(5, 7))
    assert SpecFlow(**knobs).before_lm(prompt).num_visual == expected


def test_tiles_share_by_size_or_energy():
    shapes = [(6, 6, False)] * 4 + [(6, 6, True)]
    prompt = prompt_of((shapes, "image"))
    prompt.salience[2 : 2 + 36] *= 1000
    options = {"keep_tokens": 20, "sinks": "none", "positions": "original", "min_crop": 3}
    starts = torch.tensor([section[0] for section in prompt.spans[0].sections]) + 2

    def counts(stage):
        kept = kept_of(prompt, stage.before_lm(prompt))
        return torch.bincount(torch.bucketize(kept, starts, right=True) - 1).tolist()

    assert counts(SpecFlow(**options)) == [4] * 5
    assert counts(SpecFlow(share="energy", **options))[0] > 15


def test_newlines_end_rows_that_keep_something():
    prompt = prompt_of(image(6, 5, True), ([(4, 4, True)] * 2, "video"))
    options = {"keep_tokens": 3, "sinks": "none", "positions": "original"}
    dropped = kept_of(prompt, SpecFlow(**options).before_lm(prompt))
    kept = kept_of(prompt, SpecFlow(newlines="keep", **options).before_lm(prompt))
    expected = set(dropped.tolist())
    for span in prompt.spans:
        for start, rows, columns, _ in span.sections:
            for row in range(rows):
                first = span.start + start + row * (columns + 1)
                if expected & set(range(first, first + columns)):
                    expected.add(first + columns)
    assert len(expected) > len(dropped) == 6
    assert kept.tolist() == sorted(expected)
    with_sinks = SpecFlow(newlines="keep", keep_tokens=3).before_lm(prompt)
    assert with_sinks.num_visual == len(expected) + 4


def test_a_newline_behind_everything_stays():
    span = VisualSpan(1, 17, 0, sections=((0, 4, 4, False),))
    is_visual = torch.arange(19).clamp(0, 18).sub(9).abs() < 9
    assert is_visual.sum() == 17
    prompt = Prompt(torch.randn(19, 4), torch.arange(19), is_visual, (span,))
    options = {"seed": "uniform", "keep_tokens": 2, "sinks": "none", "positions": "original"}
    kept = SpecFlow(newlines="keep", **options).before_lm(prompt).positions()
    assert 17 in kept
    assert 17 not in SpecFlow(**options).before_lm(prompt).positions()


def test_video_per_frame_and_as_octree():
    prompt = prompt_of(([(8, 8, True)] * 4, "video"))
    prompt.salience[2 : 2 + 72] *= 1000
    options = {"keep_tokens": 42, "positions": "original"}
    plain = SpecFlow(**options).before_lm(prompt)
    frames = plain.frames()[plain.is_visual]
    assert torch.bincount(frames[:42]).tolist() == [11, 11, 10, 10]
    deep = SpecFlow(video="octree", **options).before_lm(prompt)
    assert deep.num_visual == plain.num_visual == 44
    assert torch.bincount(deep.frames()[deep.is_visual][:42])[0] > 11
    (part,) = SpecFlow(video="octree").maps(picture_of(prompt))
    assert part.energy.shape == (4, 8, 8)
    assert any(frames != (0, 4) for frames, _, _ in part.leaves)


def picture_of(prompt):
    from dlm_decode.vision.picture import Picture

    return Picture.of(prompt, prompt.spans[0])


def test_energy_spreads_to_similar_tokens_only():
    """Two kinds of tokens; the seed is one spike."""
    prompt = prompt_of(image(8, 8))
    kind = torch.arange(64) % 8 < 3
    prompt.embeds[2:66] = torch.where(kind[:, None], 1.0, -1.0) * torch.ones(8)
    prompt.embeds[2:66] += 0.01 * torch.randn(64, 8, generator=generator(1))
    salience = torch.zeros(68)
    salience[2] = 1.0
    prompt = replace(prompt, salience=salience)
    (part,) = SpecFlow(num_steps=3).maps(picture_of(prompt))
    energy = part.energy.flatten()
    assert energy[0] > 0.4
    assert (energy[~kind] == 0).all()
    assert (energy[kind] > 0).sum() > 8


def test_uniform_crops_and_ablations_differ():
    prompt = prompt_of(image())
    options = {"keep_tokens": 64, "positions": "original", "sinks": "none"}
    uniform = SpecFlow(allocation="uniform", **options)
    kept = kept_of(prompt, uniform.before_lm(prompt)) - 2
    crops = kept // 24 // 6 * 4 + kept % 24 // 6
    assert torch.bincount(crops).tolist() == [4] * 16
    options["keep_tokens"] = 200
    chosen = {
        tuple(kept_of(prompt, SpecFlow(**knobs, **options).before_lm(prompt)).tolist())
        for knobs in (
            {}, {"graph": "none"}, {"graph": "token_attention"}, {"features": "tower_keys"},
            {"allocation": "uniform"}, {"allocation": "topk"}, {"seed": "norm"},
            {"seed": "uniform"}, {"delta": 0.8}, {"alpha": 0.9}, {"num_steps": None},
            {"symmetry": "or"}, {"symmetry": "and"}, {"leftover": "largest_remainder"},
        )
    }  # fmt: skip
    assert len(chosen) == 14


def test_delta_units():
    prompt = prompt_of(image())
    assert len(SpecFlow(delta=float("inf")).maps(picture_of(prompt))[0].leaves) == 1
    assert len(SpecFlow(delta=0.0).maps(picture_of(prompt))[0].leaves) == 16
    relative = SpecFlow().maps(picture_of(prompt))[0].leaves
    absolute = SpecFlow(delta=0.5 / 576, delta_unit="absolute").maps(picture_of(prompt))[0].leaves
    assert relative == absolute
    assert len(relative) > 1


def test_what_is_read_of_the_tower():
    assert SpecFlow().tower_needs == ("salience",)
    assert SpecFlow(seed="norm").tower_needs == ()
    assert SpecFlow(graph="token_attention").tower_needs == ("salience", "tower_keys")
    assert SpecFlow(features="tower_keys", seed="uniform").tower_needs == ("tower_keys",)
    bare = replace(prompt_of(image()), salience=None)
    with pytest.raises(InvalidInputError, match="reads salience of the vision tower"):
        SpecFlow().before_lm(bare)
    assert SpecFlow(seed="uniform").before_lm(bare).num_visual == 290


def test_pruned_pictures_and_half_precision():
    prompt = prompt_of(image())
    with pytest.raises(InvalidInputError, match="put specflow first"):
        SpecFlow().before_lm(SpecFlow().before_lm(prompt))
    half = replace(prompt, embeds=prompt.embeds.bfloat16())
    wide = replace(prompt, embeds=half.embeds.float())
    options = {"keep_tokens": 64, "positions": "original"}
    ours, theirs = (SpecFlow(**options).before_lm(given) for given in (half, wide))
    assert ours.embeds.dtype == torch.bfloat16
    assert ours.positions().equal(theirs.positions())
    assert ours.embeds.equal(theirs.embeds.bfloat16())


def test_large_graphs_are_built_in_pieces(monkeypatch):
    features = torch.randn(50, 6, generator=generator(0))
    whole = dense(knn_graph(features, 4, 10.0))
    monkeypatch.setattr(flow, "_SCORES_AT_ONCE", 150)
    assert torch.allclose(dense(knn_graph(features, 4, 10.0)), whole, atol=1e-6)


def test_a_seed_of_zeros_is_uniform():
    prompt = prompt_of(image(8, 8))
    dark = replace(prompt, salience=torch.zeros(prompt.length))
    plain = SpecFlow(keep_tokens=9).before_lm(dark)
    assert plain.embeds.equal(SpecFlow(keep_tokens=9, seed="uniform").before_lm(dark).embeds)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("specflow:keep_ratio=0", "keep_ratio must be above 0"),
        ("specflow:keep_ratio=0.5,keep_tokens=3", "not both"),
        ("specflow:keep_tokens=0", "keep_tokens must be a whole number of at least 1"),
        ("specflow:keep_tokens=2.5", "keep_tokens must be a whole number"),
        ("specflow:alpha=1", "alpha must be at least 0 and below 1"),
        ("specflow:tau=0", "tau must be above 0"),
        ("specflow:delta=-1", "delta must be at least 0"),
        ("specflow:num_steps=-1", "num_steps must be a whole number of at least 0"),
        ("specflow:graph=kn", "Did you mean 'knn'"),
        ("specflow:sinks=booth", "Did you mean 'both'"),
        ("specflow:newlines=kept", "Did you mean 'keep'"),
        ("specflow:positions=orginal", "Did you mean 'original'"),
        ("specflow:graph=token_attention,video=octree", "too many for a whole video"),
    ],
)
def test_mistakes(spec, message):
    with pytest.raises(InvalidInputError, match=message):
        make(spec)


def test_ablations_can_be_written_in_a_spec():
    made = make("specflow:keep_ratio=0.5,graph=none,sinks=none,allocation=topk")
    assert made == SpecFlow(keep_ratio=0.5, graph="none", sinks="none", allocation="topk")
