"""The log-prob of every term of a forest, each unique token computed once.

A *row* is a place where something is predicted: a position at one temperature. Terms that share it share its logits, so
thirty-two first tokens after one prompt meet the vocabulary once.

Invariants: only rows meet the vocabulary; log-probs are float32 or wider; terms come back in the forest's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from agentjet.merging import Forest, plant
from agentjet.schemas.sample import Sample
from agentjet.training.attention import AttentionPlan, plan_attention
from agentjet.training.head import rounded, scored_logprobs


@dataclass(frozen=True, slots=True)
class TreeInput:
    """A forest as tensors on the model's device."""

    ids: Tensor
    """[tokens]"""
    depths: Tensor
    """[tokens]"""
    plan: AttentionPlan
    row_position: Tensor
    """[rows] position whose hidden state predicts; it belongs to the token before the sampled one."""
    row_temperature: Tensor
    """[rows]"""
    term_order: Tensor
    """[terms] the forest's terms sorted by row."""
    term_row: Tensor
    """[terms] in sorted order."""
    term_id: Tensor
    """[terms] sampled token id, in sorted order."""


def tree_input(samples: Sequence[Sample], device: torch.device | str = "cpu") -> tuple[Forest, TreeInput]:
    """Joins samples and lays them out for the model."""
    forest = plant(samples)
    temperature = np.array(
        [call.temperature for sample in samples for call in sample.calls for _ in range(call.num_terms)], np.float64
    )
    keys = np.stack([forest.term_predictor.astype(np.float64), temperature], axis=1).reshape(-1, 2)
    rows, term_row = np.unique(keys, axis=0, return_inverse=True)
    term_row = term_row.reshape(-1)
    order = np.argsort(term_row, kind="stable")

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return forest, TreeInput(
        ids=tensor(forest.ids),
        depths=tensor(forest.depths),
        plan=plan_attention(forest, device),
        row_position=tensor(rows[:, 0].astype(np.int64)),
        row_temperature=tensor(rows[:, 1]),
        term_order=tensor(order),
        term_row=tensor(term_row[order]),
        term_id=tensor(forest.ids[forest.term_target][order]),
    )


def tree_logprobs(
    model: PreTrainedModel, tree: TreeInput, *, head_dtype: torch.dtype | None = None
) -> tuple[Float[Tensor, " terms"], Float[Tensor, " terms"]]:
    """Log-prob and entropy (no gradient) of every term, in the forest's order.

    Args:
        model: A causal language model loaded by `agentjet.training.model`.
        tree: From `tree_input`.
        head_dtype: Round the output projection to this type first, as an engine of that type does; the product itself
            is float32.
    """
    hidden = model.base_model(
        input_ids=tree.ids[None], position_ids=tree.depths[None], use_cache=False, tree_plan=tree.plan
    ).last_hidden_state[0]
    weight = model.get_output_embeddings().weight  # type: ignore[union-attr]
    if head_dtype is not None:
        weight = rounded(weight, head_dtype)  # type: ignore[arg-type]
    device = hidden.device.type
    found, entropy = scored_logprobs(
        hidden.index_select(0, tree.row_position),
        weight,
        tree.row_temperature,
        tree.term_row,
        tree.term_id,
        grad_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
    )
    # Back from rows to the forest's order; index_put keeps the gradient of each term in its place.
    place = torch.empty_like(tree.term_order)
    place[tree.term_order] = torch.arange(len(place), device=place.device)
    return found[place], entropy[tree.term_row][place]
