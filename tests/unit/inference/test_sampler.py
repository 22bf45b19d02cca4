import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentjet.inference.sampler import draw
from agentjet.schemas.sampling import Sampling

LOGITS = (1.0, 0.0, -1.0, -2.0)


def one(sampling: Sampling, uniform: float, logits: tuple[float, ...] = LOGITS) -> tuple[int, float]:
    ids, logprobs = draw(torch.tensor([logits]), [sampling], [uniform])
    return ids[0], logprobs[0]


def test_l2_log_probs_are_those_of_the_tempered_distribution() -> None:
    token, logprob = one(Sampling(temperature=0.6), 0.0)
    assert token == 0
    assert math.isclose(logprob, -0.20806, abs_tol=1e-5)


def test_l3_top_k_narrows_the_choice_but_not_the_log_prob() -> None:
    full = torch.log_softmax(torch.tensor(LOGITS), -1).tolist()
    draws = {one(Sampling(top_k=2), step / 100) for step in range(100)}
    assert {token for token, _ in draws} == {0, 1}
    for token, logprob in draws:
        assert math.isclose(logprob, full[token], abs_tol=1e-6)


def test_top_p_keeps_the_fewest_tokens_that_reach_the_share() -> None:
    # Probabilities: 0.644, 0.237, 0.087, 0.032.
    for share, kept in ((0.5, {0}), (0.7, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        assert {one(Sampling(top_p=share), step / 1000)[0] for step in range(1000)} == kept


def test_greedy_takes_the_first_maximum_whatever_the_number() -> None:
    token, logprob = one(Sampling(temperature=0.0), 0.999)
    assert token == 0
    assert math.isclose(logprob, torch.log_softmax(torch.tensor(LOGITS), -1)[0].item(), abs_tol=1e-6)


def test_tokens_come_as_often_as_their_probability_says() -> None:
    count = 2000
    ids, _ = draw(torch.tensor([LOGITS] * count), [Sampling()] * count, [(i + 0.5) / count for i in range(count)])
    shares = torch.bincount(torch.tensor(ids), minlength=4) / count
    assert (shares - torch.softmax(torch.tensor(LOGITS), -1)).abs().max() < 2 / count


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = (-math.inf, 0.0, -math.inf, 0.0, -math.inf)
    for uniform in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53):
        assert one(Sampling(), uniform, logits)[0] in {1, 3}


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6), st.floats(0.1, 3))
def test_a_row_is_drawn_alike_alone_and_among_others(uniforms: list[float], temperature: float) -> None:
    random = torch.Generator().manual_seed(len(uniforms))
    logits = torch.randn(len(uniforms), 17, generator=random)
    samplings = [Sampling(temperature=temperature, top_k=row % 3) for row in range(len(uniforms))]
    together = draw(logits.clone(), samplings, uniforms)
    for row, uniform in enumerate(uniforms):
        alone = draw(logits[row : row + 1].clone(), [samplings[row]], [uniform])
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row])
