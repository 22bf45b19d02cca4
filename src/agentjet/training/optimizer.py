"""AdamW and its learning rate over the steps.

Invariant: an update is applied whole or not at all; a gradient that is not finite leaves weights, moments and schedule
as they were.
"""

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from agentjet.config import LearnerSettings
from agentjet.errors import ConfigError

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


class Optimizer:
    """AdamW (arXiv:1711.05101) on the trainable weights; matrices decay, vectors (norms, biases) do not."""

    def __init__(self, model: nn.Module, settings: LearnerSettings, num_steps: int) -> None:
        self.names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._max_norm = settings.max_grad_norm
        decayed = [weight for weight in self.weights if weight.ndim > 1]
        plain = [weight for weight in self.weights if weight.ndim <= 1]
        self.adam = AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )
        length = settings.schedule_steps or num_steps
        if settings.schedule != "constant" and length <= 0:
            raise ConfigError(
                f"schedule {settings.schedule!r} needs its length: set learner.schedule_steps or run.num_steps"
            )
        # Counted per mini-batch, since each is an update of its own.
        updates = settings.num_minibatches
        schedule = get_scheduler(
            SCHEDULES[settings.schedule], self.adam, settings.warmup_steps * updates, length * updates
        )
        assert isinstance(schedule, LambdaLR)
        self.schedule = schedule

    @property
    def learning_rate(self) -> float:
        """That of the next update."""
        return float(self.schedule.get_last_lr()[0])

    def resume(self, num_updates: int) -> None:
        """Takes up the schedule after some updates; its rates are those of this configuration, not the saved ones."""
        self.schedule.last_epoch = num_updates
        bases = zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
        rates = [base * factor(num_updates) for base, factor in bases]
        for group, rate in zip(self.adam.param_groups, rates, strict=True):
            group["lr"] = rate
        self.schedule._last_lr = rates

    @property
    def num_updates(self) -> int:
        """Updates that were applied."""
        return self.schedule.last_epoch

    def update(self) -> float | None:
        """Clips and applies the gradients, then clears them; their norm before clipping, or None when not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights, self._max_norm))
        is_finite = norm < float("inf")
        if is_finite:
            self.adam.step()
            self.schedule.step()
        self.adam.zero_grad(set_to_none=True)
        return norm if is_finite else None
