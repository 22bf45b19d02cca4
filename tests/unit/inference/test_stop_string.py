from tokenizers import Tokenizer

from agentjet.inference.stop_string import StopWatcher
from agentjet.pretrained import tiny_model


class BackedTokenizer:
    """The tokenizer protocol over the tiny model's tokenizer."""

    chat_template = None

    def __init__(self) -> None:
        self.backend: Tokenizer = tiny_model._tokenizer()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self.backend.encode(text).ids

    def decode(self, token_ids: object, *, skip_special_tokens: bool = False) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, conversation: object, **_: object) -> object:
        raise NotImplementedError


TOKENIZER = BackedTokenizer()


def watch(text: str, *stops: str) -> tuple[int, str] | None:
    """Number of tokens until a stop string appears, and which."""
    watcher = StopWatcher(TOKENIZER, stops)
    for count, token in enumerate(TOKENIZER.encode(text), 1):
        if (found := watcher.add(token)) is not None:
            return count, found
    return None


def test_a_stop_string_across_many_tokens_is_seen_at_its_last() -> None:
    text = "The secret zq!x#zq is high"
    seen = watch(text, "zq!x#z")
    assert seen is not None
    assert "zq!x#z" in TOKENIZER.decode(TOKENIZER.encode(text)[: seen[0]])
    assert "zq!x#z" not in TOKENIZER.decode(TOKENIZER.encode(text)[: seen[0] - 1])


def test_of_two_the_one_that_begins_first_wins() -> None:
    assert watch("say higher", "gher", "high") == (len(TOKENIZER.encode("say higher")), "high")


def test_a_character_of_several_byte_tokens_is_seen_once_complete() -> None:
    assert watch("a🙂b", "🙂") == (5, "🙂")


def test_a_long_way_into_a_reply_it_still_sees() -> None:
    text = "number " * 300 + "stop"
    assert watch(text, "r stop") == (len(TOKENIZER.encode(text)), "r stop")


def test_special_tokens_can_stop_and_empty_strings_do_not() -> None:
    assert watch("go<|im_end|>", "<|im_end|>") == (2, "<|im_end|>")
    assert watch("go", "") is None
    assert watch("go") is None
