import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made_sample import sample_of_rows
from transformers import AutoModelForCausalLM, LlamaConfig

from agentjet.config import AlgorithmSettings, LearnerSettings, LoraSettings
from agentjet.schemas.sample import Sample
from agentjet.training.trainer import Trainer

VOCAB = 61


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model on disk."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def make_trainer(model_folder: Path) -> Callable[..., Trainer]:
    """A trainer of the tiny model; keywords go to the learner's settings, `algorithm` and `lora` to those."""

    def make(
        algorithm: dict[str, object] | None = None,
        num_steps: int = 0,
        lora: dict[str, object] | None = None,
        model: Path = model_folder,
        seed: int = 0,
        **learner: object,
    ) -> Trainer:
        return Trainer(
            model,
            LearnerSettings.model_validate({"learning_rate": 1e-2, "precision": "float32", "device": "cpu", **learner}),
            AlgorithmSettings.model_validate(algorithm or {}),
            lora=LoraSettings.model_validate(lora or {}),
            seed=seed,
            num_steps=num_steps,
            engine_dtype="float32",
            is_deterministic=True,
        )

    return make


@pytest.fixture
def make_batch() -> Callable[..., list[list[Sample]]]:
    """Groups of two-turn episodes whose log-probs are those of a uniform sampler."""

    def sample(group: int, member: int, rng: random.Random, reward: float) -> Sample:
        history = [group % VOCAB, 1, 2, 3, 4]
        rows: list[tuple[list[int], list[int]]] = []
        for _ in range(2):
            completion = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))]
            rows.append((list(history), completion))
            history += [*completion, 5, rng.randrange(VOCAB)]
        return sample_of_rows(
            rows,
            logprobs=[-4.1 for _, completion in rows for _ in completion],
            calls=[{"versions": ("1-3",)}] * len(rows),
            group=group,
            member=member,
            reward=reward,
        )

    def make(seed: int, groups: int = 3, rewards: tuple[float, ...] = (1.0, 0.0, 0.5, 0.0)) -> list[list[Sample]]:
        rng = random.Random(seed)
        return [
            [sample(group, member, rng, reward) for member, reward in enumerate(rewards)] for group in range(groups)
        ]

    return make
