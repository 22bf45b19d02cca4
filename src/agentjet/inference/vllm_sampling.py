"""A generation as vLLM's `SamplingParams`; what vLLM would draw otherwise than asked, or die of, is refused."""

from collections.abc import Sequence
from typing import Any

from agentjet.errors import BadRequestError, ContextLengthError
from agentjet.inference.engine import Generation
from agentjet.inference.vllm_launch import LaunchedModel

_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0
_SEED_MASK = 2**63 - 1


def sampling_parameters(generation: Generation, model: LaunchedModel) -> Any:
    """vLLM's `SamplingParams`.

    Raises:
        ContextLengthError: The prompt leaves no room for a token.
        BadRequestError: vLLM would draw otherwise than asked.
    """
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    sampling = generation.sampling
    room = _room(generation.prompt_ids, model)
    if sampling.temperature > _HIGHEST_TEMPERATURE or 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        raise BadRequestError(
            f"temperature: vLLM draws at 0 or from {_LOWEST_TEMPERATURE:g} to {_HIGHEST_TEMPERATURE:g}, not at "
            f"{sampling.temperature:g}"
        )
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_tokens, room),
        seed=None if sampling.seed is None else sampling.seed & _SEED_MASK,
        stop_token_ids=sorted(generation.stop_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def _room(prompt_ids: Sequence[int], model: LaunchedModel) -> int:
    """Tokens that a prompt leaves for the reply."""
    room = model.context_length - len(prompt_ids)
    if not prompt_ids or room < 1:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens, but it takes 1 to {model.context_length - 1} of the context of "
            f"{model.context_length}: shorten the conversation"
        )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < model.vocab_size:
        # In vLLM it would end the worker, and with it everybody's requests.
        raise BadRequestError(f"the prompt holds ids outside of the vocabulary of {model.vocab_size}")
    return room
