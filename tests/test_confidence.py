import pytest
import torch

from dlm_decode.confidence import PreviousLogProb, propose, rank_descending, select_top


@pytest.mark.parametrize("size", [7, 40000])
def test_matches_float64_softmax(size):
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(0)) * 4
    before = logits.clone()
    got = propose(logits, statistics=("margin", "logit_margin", "entropy"))
    assert torch.equal(got.logit_margin, before.topk(2).values.diff(dim=-1).neg()[:, 0])
    assert got.kl is None
    probabilities = before.double().softmax(-1)
    top = probabilities.topk(2).values
    assert torch.equal(got.tokens, before.argmax(-1))
    assert torch.allclose(got.log_prob.exp().double(), top[:, 0], atol=1e-6)
    assert torch.allclose(got.margin.double(), top[:, 0] - top[:, 1], atol=1e-6)
    assert torch.allclose(
        got.entropy.double(), -(probabilities * probabilities.log()).sum(-1), atol=1e-4
    )
    assert torch.equal(logits, before), "logits are scratch space, but must be given back"


def test_order_near_certainty_survives_float32():
    gaps = torch.tensor([18.0, 20.0, 25.0, 30.0])
    logits = torch.zeros(4, 3)
    logits[:, 1] = gaps
    assert torch.equal(logits.softmax(-1)[:, 1], torch.ones(4)), "softmax rounds all of them to 1"
    log_prob = propose(logits).log_prob
    assert (log_prob[1:] > log_prob[:-1]).all()


def test_bfloat16_logits_are_ordered_as_float32():
    logits = (torch.arange(64).flip(0)[:, None] / 16 * torch.tensor([[1.0, 0.0]])).to(
        torch.bfloat16
    )
    log_prob = propose(logits.clone()).log_prob
    assert log_prob.dtype == torch.float32
    assert len(log_prob.unique()) == len(logits.float().log_softmax(-1)[:, 0].unique()) == 64


def test_suppressed_and_tied_logits():
    logits = torch.tensor([[float("-inf"), 1.0, 1.0, float("-inf")]])
    got = propose(logits, statistics=("margin", "entropy"))
    assert got.tokens.item() == 1
    assert got.log_prob.exp().item() == pytest.approx(0.5)
    assert got.margin.item() == pytest.approx(0.0, abs=1e-7)
    assert got.entropy.item() == pytest.approx(0.6931, abs=1e-3)


@pytest.mark.parametrize("mask_logit", [0.5, 30.0, 500.0])
def test_unproposable_id_keeps_its_probability(mask_logit):
    logits = torch.tensor([[1.0, mask_logit, 2.0, 0.0]])
    got = propose(logits, unproposable=1, statistics=("entropy",))
    expected = torch.tensor([[1.0, min(mask_logit, 82.0), 2.0, 0.0]]).log_softmax(-1)
    assert got.tokens.item() == got.top_tokens.item() == 2
    assert got.log_prob.item() == pytest.approx(expected[0, 2].item(), rel=1e-5)
    assert got.entropy.item() == pytest.approx(-(expected.exp() * expected).sum().item(), abs=1e-5)
    assert logits[0, 1] == mask_logit


def kept(log_prob, num_spare=0):
    """A store that holds `log_prob` in reverse order, behind spare rows without a distribution."""
    store = torch.full((num_spare + len(log_prob), log_prob.shape[1]), float("-inf"))
    rows = torch.arange(len(store) - 1, num_spare - 1, -1)
    store[rows] = log_prob.float()
    return PreviousLogProb(store.to(torch.float16), rows)


@pytest.mark.parametrize("size", [7, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence_matches_float64(size, dtype):
    numbers = torch.Generator().manual_seed(0)
    before = torch.randn(4, size, generator=numbers, dtype=torch.float64) * 3
    logits = (before + torch.randn(4, size, generator=numbers) * 0.3).to(dtype)
    logits[:, 3] = before[:, 3] = float("-inf")
    now, before = logits.double().log_softmax(-1), before.log_softmax(-1)
    expected = (now.exp() * (now - before)).nan_to_num(nan=0.0).sum(-1)
    previous, given = kept(before, num_spare=2), logits.clone()
    got = propose(given, statistics=("kl",), previous=previous)
    assert got.kl.dtype == torch.float32
    assert torch.allclose(got.kl.double(), expected, atol=2e-3)
    assert torch.equal(given, logits)
    stored = previous.store[previous.rows].double()
    assert torch.allclose(stored, now, rtol=1e-3, atol=1e-4), "what is now is kept for next time"
    assert previous.store[:2].isinf().all()
    assert propose(given, statistics=("kl",), previous=previous).kl.lt(2e-3).all()
    assert torch.equal(propose(given).log_prob, got.log_prob)


def test_confident_divergence_survives_float16():
    logits = torch.zeros(1, 126464)
    logits[0, 5] = 14.0
    previous = kept(logits.log_softmax(-1))
    assert propose(logits, statistics=("kl",), previous=previous).kl.item() < 5e-4


def test_no_previous_distribution_is_infinitely_far():
    logits = torch.tensor([[1.0, 2.0, float("-inf")], [float("-inf"), 2.0, -900.0]])
    assert (propose(logits, statistics=("kl",)).kl == float("inf")).all()
    previous = PreviousLogProb(
        torch.full((3, 3), float("-inf"), dtype=torch.float16), torch.tensor([0, 2])
    )
    assert (propose(logits, statistics=("kl",), previous=previous).kl == float("inf")).all()
    assert propose(logits, statistics=("kl",), previous=previous).kl.lt(1e-3).all()


@pytest.mark.parametrize("mask_logit", [0.5, 30.0, 500.0])
def test_unproposable_id_counts_in_the_divergence(mask_logit):
    logits = torch.tensor([[1.0, mask_logit, 2.0, 0.0]])
    before = torch.tensor([[1.0, 1.0, 2.0, 0.0]]).log_softmax(-1)
    now = torch.tensor([[1.0, min(mask_logit, 82.0), 2.0, 0.0]]).log_softmax(-1)
    got = propose(logits, unproposable=1, statistics=("kl",), previous=kept(before)).kl.item()
    assert got == pytest.approx((now.exp() * (now - before)).sum().item(), abs=2e-3)


def test_nan_is_kept():
    assert propose(torch.tensor([[float("nan"), 1.0]])).log_prob.isnan().all()


def test_gumbel_equals_published_formula_and_reports_unnoised_probability():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 20000, generator=generator)
    uniform = torch.rand(5, 20000, dtype=torch.float64, generator=generator)
    got = propose(logits, temperature=0.7, uniform=uniform)
    expected = (logits.double().exp() / (-uniform.log()) ** 0.7).argmax(-1)
    assert torch.equal(got.tokens, expected)
    chosen = logits.double().softmax(-1).gather(1, expected[:, None])[:, 0]
    assert torch.allclose(got.log_prob.exp().double(), chosen, rtol=1e-4)


def test_gumbel_samples_the_tempered_distribution():
    logits = torch.tensor([[1.0, 0.0, -1.0]]).expand(40000, 3).contiguous()
    uniform = torch.rand(40000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = propose(logits.clone(), temperature=2.0, uniform=uniform).tokens
    shares = tokens.bincount(minlength=3) / 40000
    assert torch.allclose(shares, (logits[0] / 2).softmax(-1), atol=0.01)


def test_selection_ties_and_held_back():
    score = torch.tensor([[1.0, 3.0, 3.0, 2.0, 9.0]])
    eligible = torch.tensor([[True, True, True, True, False]])
    assert rank_descending(score, eligible).tolist() == [[3, 0, 1, 2, 4]]
    assert select_top(score, eligible, torch.tensor([2])).tolist() == [
        [False, True, True, False, False]
    ]
    last = torch.tensor([[False, True, False, False, True]])
    assert rank_descending(score, eligible, last).tolist() == [[2, 3, 0, 1, 4]]
    assert select_top(score, eligible, torch.tensor([9]), last).sum() == 4
    assert select_top(score, eligible, torch.tensor([0])).sum() == 0
