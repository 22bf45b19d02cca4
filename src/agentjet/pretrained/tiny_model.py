"""A two-layer random Llama with a tokenizer made on the spot: the pipeline in seconds, without any download.

The same seed gives the same bytes. Every text can be encoded (byte-level BPE), digits stand alone, and the words of
small games are single tokens, so that a reinforcement learner can find its way in a few steps. Weights are drawn so
that the first policy is near uniform. Written with numpy: torch is not needed to build it.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 128, 2, 4, 2, 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = (
    "system user assistant tool",
    "You are a player. Guess the secret number. Answer with one number and nothing else.",
    "I think of a whole number from 1 to 7. You have three guesses. Guess the number.",
    "The secret number is higher. The secret number is lower. higher lower correct wrong",
    "Your turn. My turn. Send one signal. The signal is 4. Which state is it? The state is 2.",
    "red green blue yes no stop go left right up down win lose ready done",
    "Reply with a digit only. Say only the answer. What is 3 plus 4? The answer is 7.",
)
_REPEATS = 50
_NUM_MERGES = 160


def build_tiny(path: Path, seed: int = 0) -> str:
    """Writes the model to a folder (made when missing) and returns a line about its source."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    ids = {token: tokenizer.token_to_id(token) for token in (END_OF_TEXT, IM_START, IM_END)}
    roles = {"bos_token_id": ids[IM_START], "eos_token_id": ids[IM_END], "pad_token_id": ids[END_OF_TEXT]}
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": IM_START,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )
    _write_json(path / "generation_config.json", roles)
    _write_json(path / "config.json", _config(tokenizer.get_vocab_size()) | roles)
    save_file(_weights(tokenizer.get_vocab_size(), seed), path / "model.safetensors", metadata={"format": "pt"})
    return f"tiny model, seed {seed}"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), "utf-8")


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [END_OF_TEXT, IM_START, IM_END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(specials) + len(alphabet) + _NUM_MERGES,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    # Roles and answers open a text or follow a newline, so they are trained without the leading space as well.
    words = [word for line in CORPUS for word in line.replace(".", "").replace("?", "").split()]
    tokenizer.train_from_iterator([*CORPUS, *words] * _REPEATS, trainer)
    return tokenizer


def _config(vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "dtype": "float32",
    }


def _weights(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Matrices keep the size of what passes through; small embeddings, which are the head too, give flat logits."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    kv_size = HIDDEN // HEADS * KV_HEADS
    weights = {
        "model.embed_tokens.weight": (random.standard_normal((vocab_size, HIDDEN)) * 0.02).astype(np.float32),
        "model.norm.weight": ones,
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_size, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_size, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return weights
