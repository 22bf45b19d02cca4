from types import SimpleNamespace

import pytest

from agentjet.errors import ConfigError
from agentjet.inference.policy_model import choose_context


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [(None, 4096, 4096), (None, 131_072, 8192), (None, None, 2048), (65_536, 131_072, 65_536), (16, 4096, 16)],
)
def test_the_context_is_what_was_asked_for_or_what_the_model_was_made_for_up_to_8192(
    wanted: int | None, most: int | None, expected: int
):
    assert choose_context(wanted, SimpleNamespace(max_position_embeddings=most)) == expected


def test_more_than_the_model_was_made_for_is_refused_instead_of_cut():
    with pytest.raises(ConfigError, match=r"engine.context_tokens is 8193, but the model was made for 8192"):
        choose_context(8193, SimpleNamespace(max_position_embeddings=8192))
