"""Tokenizers and end-of-turn tokens of model folders."""

import json
from pathlib import Path

import pytest

from agentjet.errors import ModelNotFoundError
from agentjet.pretrained.tiny_model import build_tiny
from agentjet.pretrained.tokenizer import load_tokenizer, stop_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_tiny(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_tokenizer_renders_chats(folder: Path):
    text = load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "Guess."}], tokenize=False)
    assert "<|im_start|>user\nGuess.<|im_end|>" in text


def test_a_model_without_a_chat_template_is_refused(folder: Path):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelNotFoundError, match="no chat template"):
        load_tokenizer(folder)


def test_a_model_without_a_tokenizer_is_refused(folder: Path):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize(("value", "expected"), [(5, {5}), ([5, 6, 7], {5, 6, 7})])
def test_r13_every_eos_token_of_the_generation_config_ends_a_reply(folder: Path, value: object, expected: set[int]):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert stop_ids(folder) == expected


def test_without_a_generation_config_the_model_s_own_config_counts(folder: Path):
    expected = stop_ids(folder)
    (folder / "generation_config.json").unlink()
    assert stop_ids(folder) == expected


def test_a_model_that_names_no_eos_token_is_refused(folder: Path):
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFoundError, match="eos_token_id"):
        stop_ids(folder)
