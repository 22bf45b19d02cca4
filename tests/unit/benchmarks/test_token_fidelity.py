"""A short run of the benchmark of token fidelity, and that it would notice a loss."""

import pytest
from adversarial_reply import STOP, Author
from chat_family import FAMILIES
from token_fidelity import is_exact, measure

from agentjet.merging import timeline


@pytest.mark.parametrize("name", FAMILIES)
async def test_every_sampled_token_of_a_family_is_trained_once(name):
    figures = (await measure([name], 8))[name]
    assert is_exact(figures)
    assert (figures["num_calls"], figures["num_distrusted"]) == (16, 0)
    assert figures["num_sampled"] > 100
    assert figures["num_drifted"] > 2
    assert figures["forks"]["stop_string"] >= 1


async def test_a_token_that_is_not_trained_is_noticed(monkeypatch):
    places = timeline.TokenTrie.places
    monkeypatch.setattr(timeline.TokenTrie, "places", lambda trie, ids: [*places(trie, ids)[:-1], places(trie, ids)[0]])
    figures = (await measure(["chatml"], 2))["chatml"]
    assert figures["num_trained"] < figures["num_sampled"]
    assert not is_exact(figures)


@pytest.mark.parametrize("name", FAMILIES)
def test_replies_are_as_adverse_as_they_claim(name):
    author = Author(FAMILIES[name])
    scripts = {script.kind: script for script, _ in zip(author.scripts(), range(15), strict=False)}
    text = author.tokenizer.decode(scripts["spelt_special"].ids[:-1], skip_special_tokens=True)
    assert author.family.end in text, "a special token in plain letters stays text"
    assert author.encode("lower and lowest town") != scripts["retokenizing"].ids[:-1]
    last = author.tokenizer.decode(scripts["stop_string"].ids[-1:])
    assert not last.endswith(STOP), "the stop string ends inside the last token"
    assert "\ufffd" in author.tokenizer.decode(scripts["broken_character"].ids)
