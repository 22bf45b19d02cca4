"""The log-prob of every term of a forest, each unique token computed once.

A *row* is a place where something is predicted: a position at one temperature. Terms that share it share its logits, so
thirty-two first tokens after one prompt meet the vocabulary once.

Invariants: only rows meet the vocabulary; log-probs are float32 or wider; terms come back in the forest's order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from agentjet.merging import Forest, plant
from agentjet.schemas.sample import Sample
from agentjet.training.attention import CarriedKeys
from agentjet.training.attention_plan import AttentionPlan, plan_attention
from agentjet.training.head import rounded, scored_logprobs


@dataclass(frozen=True, slots=True)
class TreeInput:
    """A forest, or a stretch of it, as tensors on the model's device."""

    ids: Tensor
    """[tokens]"""
    depths: Tensor
    """[tokens]"""
    plan: AttentionPlan
    row_position: Tensor
    """[rows] position whose hidden state predicts; it belongs to the token before the sampled one. Ascending."""
    row_temperature: Tensor
    """[rows]"""
    term_order: Tensor
    """[terms] the forest's terms sorted by row."""
    term_row: Tensor
    """[terms] in sorted order."""
    term_id: Tensor
    """[terms] sampled token id, in sorted order."""
    borders: tuple[int, ...]
    """Positions that part the stretches to compute one after the other; from 0 to the number of tokens."""

    @property
    def is_whole(self) -> bool:
        """Whether all of it is computed at once."""
        return len(self.borders) <= 2

    def stretches(self) -> "list[TreeInput]":
        """The stretches in preorder; the terms of each are a run of the sorted ones."""
        return [self._stretch(start, stop) for start, stop in pairwise(self.borders)]

    def _stretch(self, start: int, stop: int) -> "TreeInput":
        first, last = torch.searchsorted(
            self.row_position, torch.tensor([start, stop], device=self.ids.device)
        ).tolist()
        edges = torch.tensor([first, last], device=self.ids.device)
        rows, terms = slice(first, last), slice(*torch.searchsorted(self.term_row, edges).tolist())
        return replace(
            self,
            ids=self.ids[start:stop],
            depths=self.depths[start:stop],
            plan=self.plan.stretch(start, stop),
            row_position=self.row_position[rows] - start,
            row_temperature=self.row_temperature[rows],
            term_order=self.term_order[terms],
            term_row=self.term_row[terms] - first,
            term_id=self.term_id[terms],
            borders=(start, stop),
        )


def tree_input(
    samples: Sequence[Sample],
    device: torch.device | str = "cpu",
    *,
    stretch_tokens: Callable[[Forest], int] | None = None,
) -> tuple[Forest, TreeInput]:
    """Joins samples and lays them out for the model.

    Args:
        samples: Of one pack.
        device: The model's.
        stretch_tokens: Most tokens of the forest that may be computed at once; all of them by default.
    """
    forest = plant(samples)
    temperature = np.array(
        [call.temperature for sample in samples for call in sample.calls for _ in range(call.num_terms)], np.float64
    )
    keys = np.stack([forest.term_predictor.astype(np.float64), temperature], axis=1).reshape(-1, 2)
    rows, term_row = np.unique(keys, axis=0, return_inverse=True)
    term_row = term_row.reshape(-1)
    order = np.argsort(term_row, kind="stable")
    length = stretch_tokens(forest) if stretch_tokens else forest.num_tokens
    borders = (*range(0, forest.num_tokens, max(1, length)), forest.num_tokens)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return forest, TreeInput(
        ids=tensor(forest.ids),
        depths=tensor(forest.depths),
        plan=plan_attention(forest, device, borders=borders),
        row_position=tensor(rows[:, 0].astype(np.int64)),
        row_temperature=tensor(rows[:, 1]),
        term_order=tensor(order),
        term_row=tensor(term_row[order]),
        term_id=tensor(forest.ids[forest.term_target][order]),
        borders=borders,
    )


def output_weight(model: PreTrainedModel, head_dtype: torch.dtype | None) -> Tensor:
    """The output projection [vocab, hidden], rounded to `head_dtype` as an engine of that type has it."""
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[assignment, union-attr]
    return weight if head_dtype is None else rounded(weight, head_dtype)


def sorted_logprobs(
    model: PreTrainedModel,
    tree: TreeInput,
    weight: Tensor,
    *,
    entropy_grad: bool = False,
    carried: CarriedKeys | None = None,
) -> tuple[Float[Tensor, " terms"], Float[Tensor, " terms"]]:
    """Log-prob and entropy of every term in sorted order.

    Args:
        model: A causal language model loaded by `agentjet.training.model`.
        tree: All of a forest, or a stretch.
        weight: From `output_weight`.
        entropy_grad: Whether the entropy carries a gradient.
        carried: Keys and values of the tokens before a stretch.
    """
    hidden = model.base_model(
        input_ids=tree.ids[None], position_ids=tree.depths[None], use_cache=False, tree_plan=tree.plan, carried=carried
    ).last_hidden_state[0]
    device = hidden.device.type
    found, entropy = scored_logprobs(
        hidden.index_select(0, tree.row_position),
        weight,
        tree.row_temperature,
        tree.term_row,
        tree.term_id,
        grad_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        entropy_grad=entropy_grad,
    )
    return found, entropy.index_select(0, tree.term_row)


def tree_logprobs(
    model: PreTrainedModel, tree: TreeInput, *, head_dtype: torch.dtype | None = None, entropy_grad: bool = False
) -> tuple[Float[Tensor, " terms"], Float[Tensor, " terms"]]:
    """Log-prob and entropy of every term in the forest's order, in one graph whatever the borders.

    Args:
        model: A causal language model loaded by `agentjet.training.model`.
        tree: From `tree_input`.
        head_dtype: Round the output projection to this type first, as an engine of that type does; the product itself
            is float32.
        entropy_grad: Whether the entropy carries a gradient.
    """
    found, entropy = sorted_logprobs(model, tree, output_weight(model, head_dtype), entropy_grad=entropy_grad)
    place = torch.empty_like(tree.term_order)
    place[tree.term_order] = torch.arange(len(place), device=place.device)
    return found[place], entropy[place]
