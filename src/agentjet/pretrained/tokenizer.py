"""A model folder's tokenizer and the tokens that end its replies."""

import json
from pathlib import Path
from typing import Any

from agentjet.errors import ModelNotFoundError
from agentjet.pretrained.model_file import resolve


def load_tokenizer(name_or_path: str | Path) -> Any:
    """The Transformers tokenizer of a model that `resolve` finds.

    Raises ModelNotFoundError when the model is not there, or has no tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    folder = resolve(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"the tokenizer of {folder} can not be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise ModelNotFoundError(f"{folder} has no chat template; add chat_template.jinja, or take a chat model")
    return tokenizer


def stop_ids(name_or_path: str | Path) -> frozenset[int]:
    """Every token that ends a reply: the `eos_token_id` (one or a list) of generation_config.json, else config.json.

    Raises ModelNotFoundError when neither names one.
    """
    folder = resolve(name_or_path)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text("utf-8")).get("eos_token_id") if path.is_file() else None
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    raise ModelNotFoundError(f"{folder} names no eos_token_id; add it to generation_config.json")
