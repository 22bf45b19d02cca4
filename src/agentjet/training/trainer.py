"""One optimizer step on one batch of groups: advantages, tree forward, loss, update. No bus, no log.

Invariants:

- A step is a function of weights, optimizer state and batch. Packs and ranks only split a sum whose denominators belong
  to the whole mini-batch, so they change nothing but rounding.
- Ratios refer to the proximal policy, recomputed at the batch's start; the sampler's log-probs serve as correction only
  (unless `proximal = "sampler"`). With one mini-batch the proximal policy is the current one, and no extra pass is
  needed.
- A gradient that is not finite is skipped and reported; the state stays as it was.
- With a LoRA rank the adapter alone is trained, and the model's own weights never change.

It does not know how batches are formed (`agentjet.accounting`) or where weights go.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentjet.config import AlgorithmSettings, LearnerSettings, LoraSettings
from agentjet.merging.flop import ModelShape
from agentjet.merging.packing import Member
from agentjet.schemas.sample import Sample
from agentjet.training.adapter import Adapter, load_with_adapter
from agentjet.training.batch_metric import Work, batch_metrics
from agentjet.training.cost import pack_cost
from agentjet.training.depth_first import backward_forest, forest_logprobs
from agentjet.training.memory import MemoryBudget
from agentjet.training.model import load_model
from agentjet.training.objective import PackObjective
from agentjet.training.optimizer import Optimizer
from agentjet.training.precision import autocast, pick_dtype
from agentjet.training.rank import Ranks
from agentjet.training.reference import AdapterOff, FrozenCopy, Reference
from agentjet.training.snapshot import Snapshot, weights_digest, write_snapshot
from agentjet.training.step_batch import ByMember, Groups, StepBatch
from agentjet.training.tree_forward import tree_input


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    metrics: dict[str, float]
    is_skipped: bool
    """No update was applied: every gradient was not finite."""
    digest: str
    """sha256 over what is trained, after the step."""


@contextmanager
def _deterministic(is_wanted: bool) -> Iterator[None]:
    """Deterministic kernels inside the block, if wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Trainer:
    """Holds a model, its optimizer and their settings."""

    def __init__(
        self,
        model_path: Path | str,
        learner: LearnerSettings,
        algorithm: AlgorithmSettings,
        *,
        lora: LoraSettings | None = None,
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
            lora: With a rank: what of the model gets an adapter, which is trained instead of all weights.
            seed: Of everything random on this process.
            num_steps: Length of the run, for schedules; 0 is open.
            engine_dtype: The type in which engines hold the weights: `auto`, `bfloat16` or `float32`.
            is_deterministic: The same batches give the same bits (CPU).

        Raises:
            ModelNotFoundError: No model there.
            UnsupportedArchitectureError: Not exact on trees.
            ConfigError: A schedule without a length, or an adapter on layers that can not have one.
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
        self.adapter: Adapter | None = None
        if lora and lora.rank:
            self.adapter = load_with_adapter(self.model_path, self.device, self.dtype, lora, seed)
        self.model = self.adapter.model if self.adapter else load_model(self.model_path, self.device)
        self.optimizer = Optimizer(self.model, learner, num_steps)
        self._shape = ModelShape.of(self.model.config)
        self._budget = MemoryBudget(self._shape, self.dtype, int(learner.activation_gib * 2**30))
        self.num_skipped_in_a_row = 0
        self._ranks = Ranks(self.accelerator)
        self._reference = self._load_reference() if algorithm.kl != "none" else None

    def step(self, batch: Groups, *, policy_step: int = 0) -> StepResult:
        """Learns from one batch.

        Args:
            batch: Groups of samples; dropped groups are not in it.
            policy_step: Steps contained in the weights before this one, for staleness.

        Raises:
            ValueError: A sampler's log-prob is not a number.
        """
        started = time.perf_counter()
        work = Work()
        with _deterministic(self.is_deterministic):
            ready = StepBatch(batch, self.algorithm, self.learner.train_tokens)
            num_updates = max(1, min(self.learner.num_minibatches, len(ready.groups)))
            proximal, reference = self._look_up(ready, num_updates)
            rate = self.optimizer.learning_rate
            norms = [
                self._update(ready, range(part, len(ready.groups), num_updates), proximal, reference, work)
                for part in range(num_updates)
            ]
            work, *others = self._ranks.gather(work)
            for other in others:
                work.add(other)
        applied = [norm for norm in norms if norm is not None]
        self.num_skipped_in_a_row = 0 if applied else self.num_skipped_in_a_row + 1
        metrics = {
            **batch_metrics(batch, policy_step),
            **ready.figures(),
            **work.figures(time.perf_counter() - started),
            "grad_norm": max(applied, default=0.0),
            "learning_rate": rate,
            "skipped_in_a_row": float(self.num_skipped_in_a_row),
            "num_skipped_updates": float(len(norms) - len(applied)),
        }
        return StepResult(metrics, not applied, self.digest)

    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """[samples][terms] log-probs under the weights of now, as an engine computes them; by this rank alone."""
        with _deterministic(self.is_deterministic), autocast(self.dtype, self.device):
            return [logprob for sample in samples for logprob in self._score(self.model, [sample])]

    def engine_weights(self, path: Path) -> Snapshot:
        """Writes what is trained for engines, whole or not at all. OSError when the disk refuses."""
        return write_snapshot(self.weights, path, self.engine_dtype, self.adapter.config if self.adapter else None)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """What is trained, by its names in files: the model's weights, or its adapter's."""
        return self.adapter.weights if self.adapter else dict(self.model.named_parameters())

    @property
    def digest(self) -> str:
        """sha256 over what is trained."""
        return weights_digest(self.weights)

    @property
    def reference_digest(self) -> str:
        """sha256 over the weights that divergence is measured against; empty without a divergence."""
        return self._reference.digest if self._reference else ""

    def _load_reference(self) -> Reference:
        if self.adapter:
            return AdapterOff(self.adapter)
        home = torch.device("cpu") if self.algorithm.reference_device == "cpu" else self.device
        return FrozenCopy(self.model_path, self.device, self.dtype, home)

    def _look_up(self, ready: StepBatch, num_updates: int) -> tuple[ByMember, ByMember]:
        """Scores the batch; what the policy at its start and the reference say of its terms, where that is needed."""
        proximal: ByMember = {}
        if self.algorithm.rejection != "none":
            proximal = ready.reject(self._logprobs(self.model, ready, ready.members))
        reference: ByMember = {}
        if self._reference is not None:
            with self._reference.present() as model:
                reference = self._logprobs(model, ready, ready.members)
        ready.score(reference)
        if num_updates == 1 or self.algorithm.proximal == "sampler":
            return {}, reference
        return proximal or self._logprobs(self.model, ready, ready.live), reference

    def _update(
        self, ready: StepBatch, chosen: range, proximal: ByMember, reference: ByMember, work: Work
    ) -> float | None:
        """One optimizer update on some of the groups; the gradient's norm, or None when it was skipped."""
        weights = ready.weights(chosen)
        live = [member for member in ready.live if member in weights]
        packs = ready.packs(live, self.learner.pack_tokens)
        # One context for all packs: each weight is cast once.
        with autocast(self.dtype, self.device):
            for packed in self._ranks.share(packs):
                objective = PackObjective(
                    [ready.sample(member) for member in packed],
                    [ready.advantage(member) for member in packed],
                    [weights[member] for member in packed],
                    proximal=_joined(proximal, packed),
                    reference=_joined(reference, packed),
                    settings=self.algorithm,
                    device=self.device,
                )
                self._backward([ready.sample(member) for member in packed], objective, work)
        # Without a gradient on any rank there is nothing to add: momentum alone would move the weights on.
        if packs:
            self._ranks.add_gradients(self.optimizer.weights)
        return self.optimizer.update()

    def _backward(self, samples: Sequence[Sample], objective: PackObjective, work: Work) -> None:
        """Adds a pack's gradient to that of the weights."""
        work.num_packs += 1
        work.num_row_tokens += sum(sample.report.num_row_tokens for sample in samples)
        forest, tree = tree_input(samples, self.device, stretch_tokens=self._budget.stretch_tokens)
        work.num_tree_tokens += forest.num_tokens
        work.cost.add(pack_cost(self._shape, samples, forest, tree))
        backward_forest(
            self.model,
            tree,
            objective,
            head_dtype=self._head_dtype,
            entropy_grad=objective.needs_entropy_grad,
        )
        work.sums.add(objective.sums)

    @property
    def _head_dtype(self) -> torch.dtype | None:
        return self.engine_dtype if self.dtype != torch.float32 else None

    def _logprobs(self, model: PreTrainedModel, ready: StepBatch, members: Sequence[Member]) -> dict[Member, Tensor]:
        """Log-probs of the members' terms, on every rank."""
        found: dict[Member, Tensor] = {}
        with autocast(self.dtype, self.device):
            for packed in self._ranks.share(ready.packs(members, self.learner.pack_tokens)):
                parts = self._score(model, [ready.sample(member) for member in packed])
                found.update(zip(packed, parts, strict=True))
        # A mini-batch is packed anew, so other ranks' members may become this one's.
        gathered = self._ranks.gather(found)
        return {member: logprob.to(self.device) for part in gathered for member, logprob in part.items()}

    @torch.no_grad()
    def _score(self, model: PreTrainedModel, samples: Sequence[Sample]) -> list[Tensor]:
        """[samples][terms] log-probs of one pack, on the CPU."""
        _, tree = tree_input(samples, self.device, stretch_tokens=self._budget.stretch_tokens)
        logprob, _ = forest_logprobs(model, tree, head_dtype=self._head_dtype)
        return list(logprob.cpu().split([len(sample.term_logprob) for sample in samples]))


def _joined(found: ByMember, packed: Sequence[Member]) -> Tensor | None:
    """[terms] of a pack; None where nothing was looked up."""
    return torch.cat([found[member] for member in packed]) if found else None
