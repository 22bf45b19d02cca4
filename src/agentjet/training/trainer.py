"""One optimizer step on one batch of groups: advantages, tree forward, loss, update. No bus, no log.

Invariants:

- A step is a function of weights, optimizer state and batch. Packs and ranks only split a sum whose denominators belong
  to the whole mini-batch, so they change nothing but rounding.
- PPO clips against the proximal policy, recomputed at the batch's start; the sampler's log-probs serve as correction
  only. With one mini-batch the proximal policy is the current one, and no extra pass is needed.
- A gradient that is not finite is skipped and reported; the state stays as it was.
- Samples without an advantage have a zero gradient: they count in every denominator and are not computed.

It does not know how batches are formed (`agentjet.accounting`) or where weights go.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from agentjet.algorithm.advantage import call_advantages, group_has_signal
from agentjet.algorithm.aggregation import term_weights
from agentjet.algorithm.loss import correction_weight, is_clipped, policy_loss
from agentjet.algorithm.metric import TermSums, sum_terms
from agentjet.config import AlgorithmSettings, LearnerSettings
from agentjet.merging.packing import Member, pack
from agentjet.merging.trim import trim
from agentjet.schemas.sample import Sample
from agentjet.training.batch_metric import batch_metrics
from agentjet.training.model import load_model
from agentjet.training.optimizer import Optimizer
from agentjet.training.precision import autocast, pick_dtype
from agentjet.training.snapshot import Snapshot, weights_digest, write_snapshot
from agentjet.training.tree_forward import tree_input, tree_logprobs

Groups = Sequence[Sequence[Sample]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    metrics: dict[str, float]
    is_skipped: bool
    """No update was applied: every gradient was not finite."""
    digest: str
    """sha256 over the trainable weights after the step."""


@contextmanager
def _deterministic(is_wanted: bool) -> Iterator[None]:
    """Deterministic kernels inside the block, if wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(slots=True)
class _Work:
    """Figures that build up while a step is computed."""

    sums: TermSums
    num_tree_tokens: int = 0
    num_row_tokens: int = 0
    num_packs: int = 0

    def add(self, other: "_Work") -> None:
        """Takes in what another rank computed."""
        self.sums.add(other.sums)
        self.num_tree_tokens += other.num_tree_tokens
        self.num_row_tokens += other.num_row_tokens
        self.num_packs += other.num_packs

    def speed(self, seconds: float) -> dict[str, float]:
        """Figures of the computed forests; nothing was computed where no sample had an advantage."""
        figures = {
            "computed_tokens": float(self.num_tree_tokens),
            "packs": float(self.num_packs),
            "train_seconds": seconds,
            "tokens_per_second": self.num_tree_tokens / seconds,
        }
        if self.num_tree_tokens:
            figures["merge_token_ratio"] = self.num_row_tokens / self.num_tree_tokens
        return figures


class Trainer:
    """Holds a model, its optimizer and their settings."""

    def __init__(
        self,
        model_path: Path | str,
        learner: LearnerSettings,
        algorithm: AlgorithmSettings,
        *,
        seed: int = 0,
        num_steps: int = 0,
        engine_dtype: str = "auto",
        is_deterministic: bool = False,
    ) -> None:
        """Loads the model from a folder.

        Args:
            model_path: Folder with configuration, safetensors and tokenizer.
            learner: How it learns.
            algorithm: Advantages and loss.
            seed: Of everything random on this process.
            num_steps: Length of the run, for schedules; 0 is open.
            engine_dtype: The type in which engines hold the weights: `auto`, `bfloat16` or `float32`.
            is_deterministic: The same batches give the same bits (CPU).

        Raises:
            ModelNotFoundError: No model there.
            UnsupportedArchitectureError: Not exact on trees.
            ConfigError: A schedule without a length.
        """
        if learner.num_threads:
            torch.set_num_threads(learner.num_threads)
        torch.manual_seed(seed)
        self.accelerator = Accelerator(cpu=learner.device == "cpu")
        self.device = self.accelerator.device
        self.model_path = Path(model_path)
        self.learner, self.algorithm = learner, algorithm
        self.is_deterministic = is_deterministic
        self.engine_dtype = pick_dtype(engine_dtype, self.device)
        self.dtype = self.engine_dtype if learner.precision == "auto" else pick_dtype(learner.precision, self.device)
        self.model = load_model(self.model_path, self.device)
        self.optimizer = Optimizer(self.model, learner, num_steps)
        self.num_skipped_in_a_row = 0

    def step(self, batch: Groups, *, policy_step: int = 0) -> StepResult:
        """Learns from one batch.

        Args:
            batch: Groups of samples; dropped groups are not in it.
            policy_step: Steps contained in the weights before this one, for staleness.

        Raises:
            ValueError: A sampler's log-prob is not a number.
        """
        started = time.perf_counter()
        kept = [group for group in batch if group_has_signal(group) or not self.algorithm.drop_constant_groups]
        cuts = [[trim(sample, self.learner.train_tokens) for sample in group] for group in kept]
        groups = [[cut.sample for cut in group] for group in cuts]
        work = _Work(TermSums())
        with _deterministic(self.is_deterministic):
            advantages = [call_advantages(group, self.algorithm) for group in groups]
            num_updates = max(1, min(self.learner.num_minibatches, len(groups)))
            proximal = self._proximal(groups, advantages) if num_updates > 1 else {}
            rate = self.optimizer.learning_rate
            norms = [
                self._update(groups, range(part, len(groups), num_updates), advantages, proximal, work)
                for part in range(num_updates)
            ]
            work = self._whole(work)
        applied = [norm for norm in norms if norm is not None]
        self.num_skipped_in_a_row = 0 if applied else self.num_skipped_in_a_row + 1
        metrics = {
            **batch_metrics(batch, policy_step),
            **work.sums.means(),
            **work.speed(time.perf_counter() - started),
            "grad_norm": max(applied, default=0.0),
            "learning_rate": rate,
            "cut_tokens": float(sum(cut.num_lost for group in cuts for cut in group)),
            "shortened_context_tokens": float(sum(cut.num_shortened for group in cuts for cut in group)),
            "skipped_in_a_row": float(self.num_skipped_in_a_row),
            "num_skipped_updates": float(len(norms) - len(applied)),
        }
        return StepResult(metrics, not applied, weights_digest(self.model))

    def engine_weights(self, path: Path) -> Snapshot:
        """Writes the weights for engines, whole or not at all. OSError when the disk refuses."""
        return write_snapshot(self.model, path, self.engine_dtype)

    @property
    def digest(self) -> str:
        """sha256 over the trainable weights."""
        return weights_digest(self.model)

    def _update(
        self,
        groups: Groups,
        chosen: range,
        advantages: Sequence[Sequence[Sequence[float]]],
        proximal: Mapping[Member, Tensor],
        work: _Work,
    ) -> float | None:
        """One optimizer update on some of the groups; the gradient's norm, or None when it was skipped."""
        members = [(group, member) for group in chosen for member in range(len(groups[group]))]
        layout = [[call.num_terms for call in groups[group][member].calls] for group, member in members]
        weights = dict(zip(members, term_weights(layout, self.algorithm), strict=True))
        # One context for all packs: each weight is cast once.
        with autocast(self.dtype, self.device):
            for packed in self._packs(groups, members, advantages):
                loss = self._pack_loss(groups, packed, advantages, weights, proximal, work)
                loss.backward()
        self._add_ranks()
        return self.optimizer.update()

    def _packs(
        self, groups: Groups, members: Sequence[Member], advantages: Sequence[Sequence[Sequence[float]]]
    ) -> list[list[Member]]:
        """This rank's packs of the members that have a gradient."""
        live = [
            (group, member)
            for group, member in members
            if any(advantages[group][member]) and groups[group][member].term_logprob
        ]
        rows = {
            group: [member for owner, member in live if owner == group] for group in dict.fromkeys(g for g, _ in live)
        }
        names = list(rows)
        packs = pack([[groups[group][member] for member in rows[group]] for group in names], self.learner.pack_tokens)
        own = packs[self.accelerator.process_index :: self.accelerator.num_processes]
        return [[(names[group], rows[names[group]][place]) for group, place in packed] for packed in own]

    def _pack_loss(
        self,
        groups: Groups,
        packed: Sequence[Member],
        advantages: Sequence[Sequence[Sequence[float]]],
        weights: Mapping[Member, Sequence[float]],
        proximal: Mapping[Member, Tensor],
        work: _Work,
    ) -> Tensor:
        samples = [groups[group][member] for group, member in packed]
        logprob, entropy = self._forward(samples, work)
        advantage = self._by_term(samples, [advantages[group][member] for group, member in packed])
        weight = self._by_term(samples, [weights[member] for member in packed])
        sampler = torch.tensor([value for sample in samples for value in sample.term_logprob], device=self.device)
        anchor = torch.cat([proximal[member] for member in packed]) if proximal else logprob.detach()
        correction = correction_weight(anchor, sampler, self.algorithm)
        losses = policy_loss(logprob, anchor, advantage, self.algorithm) * correction * weight
        work.sums.add(
            sum_terms(
                logprob.detach(),
                proximal=anchor,
                sampler=sampler,
                loss=losses,
                is_cut=is_clipped(logprob.detach(), anchor, advantage, self.algorithm),
                entropy=entropy,
                correction=correction,
            )
        )
        return losses.sum()

    def _forward(self, samples: Sequence[Sample], work: _Work) -> tuple[Tensor, Tensor]:
        forest, tree = tree_input(samples, self.device)
        work.num_tree_tokens += forest.num_tokens
        work.num_row_tokens += sum(sample.report.num_row_tokens for sample in samples)
        work.num_packs += 1
        head_dtype = self.engine_dtype if self.dtype != torch.float32 else None
        return tree_logprobs(self.model, tree, head_dtype=head_dtype)

    @torch.no_grad()
    def _proximal(self, groups: Groups, advantages: Sequence[Sequence[Sequence[float]]]) -> dict[Member, Tensor]:
        """Log-probs of every term that has a gradient, under the weights at the batch's start."""
        found: dict[Member, Tensor] = {}
        members = [(group, member) for group in range(len(groups)) for member in range(len(groups[group]))]
        with autocast(self.dtype, self.device):
            for packed in self._packs(groups, members, advantages):
                samples = [groups[group][member] for group, member in packed]
                logprob, _ = self._forward(samples, _Work(TermSums()))
                parts = logprob.split([len(sample.term_logprob) for sample in samples])
                found.update(zip(packed, parts, strict=True))
        # A mini-batch is packed anew, so other ranks' members may become this one's.
        return {
            member: logprob.to(self.device)
            for part in self._of_ranks({member: logprob.cpu() for member, logprob in found.items()})
            for member, logprob in part.items()
        }

    def _by_term(self, samples: Sequence[Sample], values: Sequence[Sequence[float]]) -> Tensor:
        """[terms] a value of each call, repeated over its terms."""
        spread = [
            value
            for sample, row in zip(samples, values, strict=True)
            for call, value in zip(sample.calls, row, strict=True)
            for _ in range(call.num_terms)
        ]
        return torch.tensor(spread, dtype=torch.float32, device=self.device)

    def _whole(self, work: _Work) -> _Work:
        """The figures of all ranks together, in the order of the ranks."""
        first, *others = self._of_ranks(work)
        for other in others:
            first.add(other)
        return first

    def _of_ranks(self, own: T) -> list[T]:
        """What every rank holds, by rank."""
        return [own] if self.accelerator.num_processes == 1 else gather_object([own])

    def _add_ranks(self) -> None:
        """Sums the gradients of all ranks; each computed its packs of one and the same sum."""
        if self.accelerator.num_processes == 1:
            return
        for weight in self.optimizer.weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad = self.accelerator.reduce(weight.grad, reduction="sum")  # type: ignore[assignment]
