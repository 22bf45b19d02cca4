"""Draws tokens and says how likely they were.

Invariants:

- A token's log-prob is that of the whole vocabulary at the sampling temperature, log_softmax(logits / T) in float32,
  whatever top-p or top-k keep. Greedy draws (T = 0) carry the log-prob at temperature 1.
- A request's draws depend on its own random numbers and logits only, never on who shares its batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentjet.schemas.sampling import Sampling


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
    logprobs = torch.log_softmax(logits, -1)
    weights = logprobs.exp()
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0 and (sampling.top_k or sampling.top_p < 1):
            _truncate(weights[row], sampling)
    totals = weights.cumsum(-1, dtype=torch.float64)
    marks = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(1) * totals[:, -1:]
    tokens = torch.searchsorted(totals, marks, right=True).clamp_(max=logits.shape[1] - 1)
    greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature == 0]
    if greedy:
        tokens[greedy] = logprobs[greedy].argmax(-1, keepdim=True)
    chosen = logprobs.gather(1, tokens)
    return tokens.squeeze(1).tolist(), chosen.squeeze(1).tolist()


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
