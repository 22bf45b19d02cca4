"""How engine and learner are compared, and how far apart they may be."""

from typing import Annotated

from pydantic import Field

from agentjet.config.section import Count, Natural, Section

Bound = Annotated[float, Field(ge=0)]


class AgreementSettings(Section):
    """Before a step the learner computes log-probs of the engines again, on tokens of the weights that it holds."""

    every_steps: Natural = 10
    """Steps between comparisons; a learner's first step makes one too, and after an alarm every step does. 0: none."""
    num_tokens: Count = 2048
    """Tokens of one comparison, over all engines; whole episodes are taken until there are that many."""
    max_mean_nats: Bound = 0.0
    """Largest mean of |learner's log-prob - engine's| without an alarm; 0 takes that of the engine's
    dtype: 0.06 for bfloat16, 0.0002 for float32."""
    max_p999_nats: Bound = 0.0
    """As `max_mean_nats`, of the 99.9th percentile; 0 takes 0.6 for bfloat16, 0.002 for float32."""
    max_nats: Bound = 0.0
    """As `max_mean_nats`, of the largest difference; 0 takes 0.002 for float32, and no bound for bfloat16."""
