"""The part of a Transformers tokenizer that chat uses."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to ids and back; `PreTrainedTokenizerFast` is one."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja template, or None for a model without chat."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Ids of a text; special tokens written out in it become single ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of ids; bytes that are not yet whole characters become U+FFFD."""
        ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        """The rendered conversation."""
        ...
