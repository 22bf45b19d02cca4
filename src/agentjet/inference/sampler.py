"""Draws tokens and says how likely they were.

Invariants:

- A token's log-prob is that of the whole vocabulary at the sampling temperature, log_softmax(logits / T) in float32,
  whatever top-p or top-k keep. Greedy draws (T = 0) carry the log-prob at temperature 1.
- A request's draws depend on its own random numbers and logits only, never on who shares its batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from agentjet.schemas.sampling import Sampling

_BLOCK = 256
_BELOW_ONE = 1.0 - 2.0**-50


def draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """One token for each row.

    Args:
        logits: Float32 [rows, vocabulary]; overwritten.
        samplings: How each row is drawn.
        uniforms: A number in [0, 1) for each row, used by inversion of the distribution function.

    Returns:
        The ids and their float32 log-probs.
    """
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits.div_(torch.tensor(temperatures, device=logits.device).unsqueeze(1))
    probabilities = torch.softmax(logits, -1)
    for row, sampling in enumerate(samplings):
        # What stays keeps its probability, so the one of the drawn token is still that of the whole vocabulary.
        if sampling.top_k or sampling.top_p < 1:
            _truncate(probabilities[row], sampling)
    tokens = _invert(probabilities, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
    greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature == 0]
    if greedy:
        tokens[greedy] = probabilities[greedy].argmax(-1)
    chosen = probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.tolist(), chosen.log().tolist()


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Places where the distribution functions of `weights` [rows, vocabulary] pass `uniforms` [rows].

    Blocks are summed first and only the one that is hit is looked through: running sums over a whole vocabulary in
    float64 take longer than all the rest of a draw.
    """
    rows, size = weights.shape
    num_blocks = -(-size // _BLOCK)
    blocks = functional.pad(weights, (0, num_blocks * _BLOCK - size)).view(rows, num_blocks, _BLOCK)
    block, rest = _pass(blocks.sum(-1), uniforms)
    place, _ = _pass(blocks[torch.arange(rows, device=weights.device), block], rest)
    return block * _BLOCK + place


def _pass(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Where running sums pass the share `uniforms` of the total, and how far into that entry, as a share of it."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    # Rounding must not lead past the last entry that weighs anything.
    marks = (uniforms.unsqueeze(1) * sums[:, -1:]).minimum(sums[:, -1:] * _BELOW_ONE)
    places = torch.searchsorted(sums, marks, right=True)
    entry = weights.gather(1, places).double()
    shares = (marks - (sums.gather(1, places) - entry)) / entry
    return places.squeeze(1), shares.squeeze(1).clamp(0.0, _BELOW_ONE)


def _truncate(weights: Tensor, sampling: Sampling) -> None:
    """Sets to zero what top-k and then top-p leave out; the most likely token always stays."""
    ordered, places = weights.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1:
        kept = ordered * keep
        # A token stays when those before it do not yet reach the share.
        keep &= kept.cumsum(0) - kept < sampling.top_p * kept.sum()
    weights[places[~keep]] = 0.0
