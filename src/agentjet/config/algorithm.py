"""`[models.NAME.algorithm]`: advantages, loss and corrections, with presets.

Invariants: a preset fills what is not set and nothing else; a combination that can not mean what it says is refused,
in one sentence. Checks look at values only, so settings that were written down in full are read back unchanged.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from agentjet.config.section import Count, Natural, Positive, Section, Share

Preset = Literal["none", "grpo", "dapo", "dr_grpo", "gspo", "cispo"]

PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "grpo": {
        "advantage": "grpo",
        "loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 0.0,
        "aggregation": "sequence_mean",
        "kl": "k3",
        "kl_coefficient": 0.04,
    },
    "dapo": {
        "advantage": "grpo",
        "loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 0.0,
        "aggregation": "token_mean",
        "drop_constant_groups": True,
        "overlong": "penalty",
        "overlong_tokens": 20_480,
        "overlong_buffer_tokens": 4_096,
    },
    "dr_grpo": {
        "advantage": "centred",
        "loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 0.0,
        "aggregation": "constant",
    },
    "gspo": {
        "advantage": "grpo",
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": 0.0,
        "aggregation": "sequence_mean",
    },
    "cispo": {
        "advantage": "grpo",
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "dual_clip": 0.0,
        "aggregation": "token_mean",
    },
}
"""What each preset fills in; `docs/algorithms.md` has the sources."""


class AlgorithmSettings(Section):
    """Advantages and loss. Formulas, sources and presets: `docs/algorithms.md`."""

    preset: Preset = "none"
    """Fills the keys of this table that are not set with a published algorithm's values."""
    advantage: Literal["grpo", "centred", "rloo", "maxrl", "reinforce++", "reinforce++_baseline"] = "grpo"
    """`grpo`: (r - mean) / std; `centred`: r - mean (Dr. GRPO); `rloo`: r - mean of the others; `maxrl`: (r - mean) /
    mean, for rewards of 0 or more; `reinforce++`: whitened over the whole batch; `reinforce++_baseline`: the group's
    mean subtracted first."""
    credit: Literal["episode", "call"] = "episode"
    """What earns: `episode`: its reward, for all its calls alike; `call`: a call gets the normalized rewards of its own
    and of the calls after it (process supervision); a group in which a call has no reward falls back to `episode`."""
    discount: Share = 1.0
    """What a reward of the next call is worth to a call, with `credit = "call"`."""
    std: Literal["population", "sample"] = "sample"
    """Which standard deviation `grpo` divides by."""
    std_epsilon: Positive = 1e-6
    loss: Literal["reinforce", "ppo", "gspo", "cispo", "sapo"] = "ppo"
    """`reinforce`: -A * log-prob; `ppo`: clipped ratio; `gspo`: clipped ratio of the sequence; `cispo`: log-prob
    weighted by the clipped ratio; `sapo`: a smooth gate in place of the clip."""
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Field(ge=0)] = 3.0
    """Bound of `ppo` on the loss of negative advantages, in multiples of A; 0 is off."""
    sapo_positive: Positive = 1.0
    """Temperature of the `sapo` gate where A > 0."""
    sapo_negative: Positive = 1.05
    """Temperature of the `sapo` gate elsewhere; a higher one narrows the gate."""
    proximal: Literal["recomputed", "sampler"] = "recomputed"
    """Policy that ratios refer to: the learner's own at the batch's start, or the sampler's log-probs as recorded (then
    the ratio corrects by itself, and `correction` and `rejection` have to be `none`)."""
    correction: Literal["none", "tis", "icepop", "sequence_tis"] = "tis"
    """Weight for the sampler's distance to the proximal policy: a token's truncated ratio, its ratio inside a band, or
    the sequence's truncated ratio."""
    correction_cap: Positive = 2.0
    """Upper cap of `tis` and `sequence_tis`, upper end of the `icepop` band."""
    correction_floor: Annotated[float, Field(ge=0)] = 0.5
    """Lower end of the `icepop` band."""
    rejection: Literal["none", "sequence", "geometric"] = "none"
    """Leaves out sequences that the sampler drew too differently: by the product of their terms' ratios, or by its
    geometric mean. Costs one more forward pass."""
    rejection_cap: Positive = 2.0
    """Highest ratio that is kept."""
    rejection_floor: Annotated[float, Field(ge=0)] = 0.5
    """Lowest ratio that is kept."""
    aggregation: Literal["episode", "token_mean", "sequence_mean", "sequence_sum", "constant"] = "episode"
    """How token losses become one number; `episode`: each episode's terms weigh 1/episodes in all."""
    sequence: Literal["call", "episode"] = "call"
    """What a sequence is, wherever one is spoken of."""
    constant_divisor: Positive = 1024.0
    """Divisor of the `constant` aggregation."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Keeps the policy near the weights that the run began with: `k1` in the episode's reward, `k2` or
    importance-weighted `k3` in the loss."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    reference_device: Literal["auto", "cpu"] = "auto"
    """Where the reference's weights lie between steps; `auto`: where the learner computes."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Bonus for entropy, in the loss."""
    drop_constant_groups: bool = False
    """Discard groups whose rewards are all equal, as they were scored (they never count in a denominator)."""
    overlong: Literal["none", "mask", "penalty"] = "none"
    """`mask`: replies that were cut by length do not train; `penalty`: long sequences cost reward (DAPO)."""
    overlong_tokens: Natural = 0
    """Sampled tokens of a sequence at which `penalty` is whole."""
    overlong_buffer_tokens: Natural = 0
    """Over how many tokens before that it grows from 0."""
    overlong_penalty: Positive = 1.0
    """The whole penalty, in units of reward."""
    min_group: Count = 2
    """Fewest usable members of a group that trains with its survivors."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        data = dict(cast("Mapping[str, Any]", given))
        filled = dict(PRESETS.get(str(data.get("preset", "none")), {}))
        if data.get("kl") == "none":
            filled.pop("kl_coefficient", None)
        return {**filled, **data}

    @model_validator(mode="after")
    def _fits_together(self) -> "AlgorithmSettings":
        for is_wrong, sentence in self._conflicts():
            if is_wrong:
                raise ValueError(sentence)
        return self

    def _conflicts(self) -> tuple[tuple[bool, str], ...]:
        has_kl, shapes_reward = self.kl != "none", self.kl == "k1" or self.overlong == "penalty"
        return (
            (
                has_kl and self.kl_coefficient == 0,
                f'kl = "{self.kl}" with kl_coefficient = 0 does nothing; set a coefficient, or kl = "none"',
            ),
            (
                not has_kl and self.kl_coefficient > 0,
                'kl_coefficient does nothing with kl = "none"; set kl to "k1", "k2" or "k3"',
            ),
            (
                self.loss == "gspo"
                and self.aggregation != "sequence_mean"
                and (self.aggregation, self.sequence) != ("episode", "episode"),
                f'loss = "gspo" gives each sequence one ratio and one weight, but aggregation = "{self.aggregation}" '
                f'weighs each {self.sequence} by its length; set aggregation = "sequence_mean", '
                'or both aggregation and sequence to "episode"',
            ),
            (
                self.proximal == "sampler" and (self.correction, self.rejection) != ("none", "none"),
                'proximal = "sampler" leaves no distance to correct; set correction = "none" and rejection = "none"',
            ),
            (
                self.correction == "icepop" and self.correction_floor >= self.correction_cap,
                "correction_floor has to be below correction_cap",
            ),
            (
                self.rejection != "none" and self.rejection_floor >= self.rejection_cap,
                "rejection_floor has to be below rejection_cap",
            ),
            (
                self.overlong == "penalty" and self.overlong_tokens <= self.overlong_buffer_tokens,
                'overlong = "penalty" needs overlong_tokens above overlong_buffer_tokens',
            ),
            (
                self.credit == "call" and self.advantage in {"rloo", "maxrl"},
                f'advantage = "{self.advantage}" compares whole episodes; with credit = "call" take "grpo", "centred", '
                '"reinforce++" or "reinforce++_baseline"',
            ),
            (
                self.credit == "episode" and self.discount != 1,
                'discount does nothing with credit = "episode"; set credit = "call", or leave discount at 1',
            ),
            (
                self.advantage == "maxrl" and shapes_reward,
                'advantage = "maxrl" needs rewards of 0 or more, and kl = "k1" or overlong = "penalty" takes from them',
            ),
        )
