"""Which sampling a call gets: the caller's wish, the ticket's defaults, and what training or evaluation rules out.

Invariants:

- On a training key log-probs are those of the whole vocabulary at the call's temperature, so cuts (top-p, top-k) are
  lifted and greedy drawing becomes sampling. What was changed is named.
- A model that the ticket does not play, a judge or a frozen opponent, draws as it was asked to: it has no ratio.
- On an evaluation key the ticket's sampling wins, and draws follow from its seed.
- Members of a group never share draws: a caller's seed is mixed with the member, else a group that passes its task's
  seed on would play the same episode several times.
"""

import hashlib
from collections.abc import Collection

from agentjet.schemas.sampling import Sampling
from agentjet.schemas.task import EpisodeKind, Ticket

_DISTRIBUTION = ("temperature", "top_p", "top_k")


def effective_sampling(
    asked: Sampling,
    ticket: Ticket,
    *,
    is_played: bool = True,
    given: Collection[str] | None = None,
    num_calls_before: int = 0,
    choice: int = 0,
) -> tuple[Sampling, tuple[str, ...]]:
    """The sampling of a call and the names of the fields that differ from what was asked.

    Args:
        asked: The caller's fields.
        ticket: Its sampling stands for what the caller did not choose.
        is_played: Whether the ticket trains or evaluates the model.
        given: Fields that the caller chose; None for all.
        num_calls_before: Calls that the attempt has made; part of an evaluation's seeds.
        choice: Index among the choices of one request, which are drawn apart.
    """
    chosen = Sampling.model_fields if given is None else given
    wanted = ticket.sampling.model_copy(update={name: getattr(asked, name) for name in chosen})
    is_eval = ticket.kind is EpisodeKind.EVAL
    fixed: dict[str, float] = {}
    if is_played:
        fixed = _of_evaluation(ticket) if is_eval else _of_training(wanted, ticket)
    overridden = tuple(name for name in fixed if getattr(wanted, name) != fixed[name])
    seed = wanted.seed
    if is_eval:
        seed = _mix(ticket.seed if seed is None else seed, ticket.member, num_calls_before, choice)
    elif seed is not None:
        seed = _mix(seed, ticket.member)
    return wanted.model_copy(update=fixed | {"seed": seed}), overridden


def _of_training(wanted: Sampling, ticket: Ticket) -> dict[str, float]:
    temperature = wanted.temperature or ticket.sampling.temperature or 1.0
    return {"temperature": temperature, "top_p": 1.0, "top_k": 0}


def _of_evaluation(ticket: Ticket) -> dict[str, float]:
    return {name: getattr(ticket.sampling, name) for name in _DISTRIBUTION}


def _mix(*numbers: int) -> int:
    """A seed of 63 bits."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
