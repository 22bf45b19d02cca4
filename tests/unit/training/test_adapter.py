import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentjet.config import LoraSettings
from agentjet.errors import ConfigError
from agentjet.pretrained.adapter_file import PREFIX, lay_out, read_config
from agentjet.training import depth_first
from agentjet.training.adapter import Adapter
from agentjet.training.model import load_model
from agentjet.training.trainer import Trainer

LORA = {"rank": 4, "alpha": 8.0}
K3 = {"kl": "k3", "kl_coefficient": 1.0}


def copies(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def test_only_the_adapter_is_trained_and_the_base_keeps_its_bits(make_trainer, make_batch):
    trainer = make_trainer(lora=LORA, num_minibatches=2)
    before = copies(trainer)
    result = trainer.step(make_batch(0))
    assert not result.is_skipped
    changed = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert changed == set(trainer.optimizer.names)
    assert len(changed) == 2 * 7 * 2  # layers, targets, A and B


def test_the_base_s_matrices_lie_in_the_type_that_multiplies_and_the_adapter_in_float32(make_trainer):
    trainer = make_trainer(lora=LORA, precision="bf16")
    kinds = {name.removesuffix(".weight").rpartition("layers.0.")[2]: w.dtype for name, w in copies(trainer).items()}
    assert kinds["self_attn.q_proj.base_layer"] == kinds["mlp.down_proj.base_layer"] == torch.bfloat16
    assert kinds["self_attn.q_proj.lora_A.default"] == kinds["mlp.down_proj.lora_B.default"] == torch.float32
    assert kinds["model.embed_tokens"] == kinds["input_layernorm"] == torch.float32
    assert trainer.model.get_output_embeddings().weight is trainer.model.get_input_embeddings().weight


def test_a_fresh_adapter_is_a_function_of_the_seed_and_changes_nothing(make_trainer, make_batch):
    one, same, other = (make_trainer(lora=LORA, seed=seed) for seed in (3, 3, 4))
    samples = make_batch(0)[0]
    assert one.digest == same.digest != other.digest
    for plain, adapted in zip(make_trainer().logprobs(samples), other.logprobs(samples), strict=True):
        assert torch.equal(plain, adapted)


def test_what_was_drawn_before_does_not_enter_a_fresh_adapter(model_folder: Path):
    def fresh() -> dict[str, torch.Tensor]:
        torch.rand(3)
        settings = LoraSettings(rank=4)
        return Adapter(load_model(model_folder), settings, base=model_folder, dtype=torch.float32, seed=3).weights

    for one, other in zip(fresh().values(), fresh().values(), strict=True):
        assert torch.equal(one, other)


def test_a_is_as_random_as_peft_makes_it(make_trainer, model_folder: Path):
    trainer = make_trainer(lora={"rank": 64})
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_folder),
        LoraConfig(r=64, target_modules=["q_proj"]),  # type: ignore[arg-type]
    )
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
    expected = theirs.get_parameter(name.replace(".weight", ".default.weight")).detach()
    found = trainer.weights[name].detach()
    assert float(found.std()) == pytest.approx(float(expected.std()), rel=0.05)
    assert float(found.abs().max()) == pytest.approx(float(expected.abs().max()), rel=0.02)
    assert not any(weight.any() for key, weight in trainer.weights.items() if "lora_B" in key)


@pytest.mark.parametrize(
    ("targets", "match"),
    [
        (["q_proj", "wrong"], r"'wrong' is no linear layer.*choose among down_proj, gate_proj, k_proj, o_proj, q_proj"),
        (["mlp"], r"'mlp' is no linear layer"),
        (["embed_tokens"], r"'embed_tokens' is no linear layer"),
        (["q_proj", "lm_head"], r"'lm_head' is its output head"),
        (["proj"], r"'proj' is no linear layer"),
    ],
)
def test_targets_that_can_not_have_an_adapter_are_refused_by_name(make_trainer, targets, match):
    with pytest.raises(ConfigError, match=match):
        make_trainer(lora=LORA | {"target_modules": targets})


def test_a_target_may_be_one_layer_only(make_trainer):
    trainer = make_trainer(lora=LORA | {"target_modules": ["layers.1.self_attn.q_proj"]})
    assert [name.removeprefix(PREFIX) for name in trainer.weights] == [
        f"model.layers.1.self_attn.q_proj.{part}.weight" for part in ("lora_A", "lora_B")
    ]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_r14_a_fresh_adapter_has_a_divergence_of_exactly_zero_and_a_trained_one_has_not(
    make_trainer, make_batch, precision
):
    trainer = make_trainer(K3, lora=LORA, precision=precision)
    first, second = trainer.step(make_batch(0)), trainer.step(make_batch(1))
    assert first.metrics["reference_kl"] == 0.0
    assert second.metrics["reference_kl"] > 0.0


def test_the_reference_is_the_base_itself_and_no_second_model(make_trainer, make_batch, monkeypatch):
    made: list[PreTrainedModel] = []

    def counted(*args, **options) -> PreTrainedModel:
        made.append(load_model(*args, **options))
        return made[-1]

    for module in ("model", "reference", "trainer"):
        monkeypatch.setattr(f"agentjet.training.{module}.load_model", counted)
    plain = make_trainer(K3)
    assert len(made) == 2
    made.clear()
    trainer = make_trainer(K3, lora=LORA)
    trainer.step(make_batch(0))
    assert made == [trainer.model]
    assert trainer.reference_digest == plain.reference_digest == plain.digest
    reference = trainer._reference
    with reference.present() as model:
        assert model is trainer.model
        off = trainer.logprobs(make_batch(0)[0])
    for one, other in zip(off, plain.logprobs(make_batch(0)[0]), strict=True):
        assert torch.equal(one, other)


def test_after_the_reference_was_asked_the_adapter_is_trained_on(make_trainer, make_batch):
    trainer = make_trainer(K3 | {"correction": "none"}, lora=LORA, num_minibatches=2)
    digests = {trainer.step(make_batch(seed)).digest for seed in range(3)}
    assert len(digests) == 3
    assert all(weight.requires_grad for weight in trainer.weights.values())


def test_an_adapter_learns_what_all_weights_would(make_trainer, make_batch):
    """The same batch again and again: its rewarded replies become more likely."""
    trainer, batch = make_trainer({"correction": "none"}, lora={"rank": 8}, learning_rate=5e-3), make_batch(0, groups=1)
    best = [max(batch[0], key=lambda sample: sample.reward)]
    (before,) = trainer.logprobs(best)
    for _ in range(6):
        trainer.step(batch)
    assert trainer.logprobs(best)[0].sum() > before.sum() + 0.1


def test_r18_a_gradient_that_is_not_finite_leaves_the_adapter_as_it_was(make_trainer, make_batch):
    trainer, batch = make_trainer(lora=LORA), make_batch(0)
    trainer.step(batch)
    before, updates = trainer.digest, trainer.optimizer.num_updates
    handle = trainer.optimizer.weights[3].register_hook(lambda grad: grad * float("nan"))
    result = trainer.step(batch)
    handle.remove()
    assert (result.is_skipped, result.digest, trainer.optimizer.num_updates) == (True, before, updates)
    assert trainer.step(batch).digest != before


def test_a_walk_in_bfloat16_gives_the_adapter_its_gradient(make_trainer, make_batch, monkeypatch):
    """Its first pass computes without gradients under the same autocast as the last."""
    monkeypatch.setattr("agentjet.training.memory.MIN_TOKENS", 8)
    walk, walks, gradients = depth_first._walk_back, [], []
    monkeypatch.setattr(depth_first, "_walk_back", lambda *args: walks.append(len(gradients)) or walk(*args))
    for gib in (4.0, 1e-6):
        trainer = make_trainer(lora=LORA, precision="bf16")
        trainer.step(make_batch(0))
        trainer._budget = replace(trainer._budget, num_bytes=int(gib * 2**30))
        update = trainer.optimizer.update

        def keep(trainer=trainer, update=update) -> float | None:
            gradients.append(torch.cat([weight.grad.flatten() for weight in trainer.optimizer.weights]))
            return update()

        monkeypatch.setattr(trainer.optimizer, "update", keep)
        trainer.step(make_batch(1))
    assert set(walks) == {1}, "the second alone was walked"
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999
    assert float(gradients[1].norm()) == pytest.approx(float(gradients[0].norm()), rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_get_the_adapter_as_one_file_that_peft_loads(make_trainer, make_batch, tmp_path: Path, dtype):
    trainer = make_trainer(lora=LORA)
    trainer.engine_dtype = getattr(torch, dtype)
    trainer.step(make_batch(0))
    snapshot = trainer.engine_weights(tmp_path / "1-1.safetensors")
    assert snapshot.num_bytes == (tmp_path / "1-1.safetensors").stat().st_size
    assert snapshot.dtype == dtype
    assert [path.name for path in tmp_path.iterdir()] == ["1-1.safetensors"]
    for name, tensor in load_file(tmp_path / "1-1.safetensors").items():
        assert torch.equal(tensor, trainer.weights[name].to(trainer.engine_dtype))
    folder = lay_out(tmp_path / "1-1.safetensors", tmp_path / "adapter")
    if dtype == "float32":
        assert_same(AutoPeftModelForCausalLM.from_pretrained(str(folder)), trainer, make_batch(1)[0])


def assert_same(model, trainer: Trainer, samples) -> None:
    """Peft's model gives the trainer's log-probs, and not those of the base."""
    for sample, logprob in zip(samples, trainer.logprobs(samples), strict=True):
        with torch.no_grad():
            rows = [row_logprobs(model, sample, call) for call in range(len(sample.calls))]
        torch.testing.assert_close(torch.cat(rows), logprob, rtol=1e-5, atol=1e-5)
        with model.disable_adapter(), torch.no_grad():
            base = [row_logprobs(model, sample, call) for call in range(len(sample.calls))]
        assert (torch.cat(base) - logprob).abs().max() > 1e-3


def row_logprobs(model, sample, call: int) -> torch.Tensor:
    """[terms] of one call, as a row of its own."""
    start = sum(one.num_terms for one in sample.calls[:call])
    terms = range(start, start + sample.calls[call].num_terms)
    segment, path = sample.term_segment[terms[-1]], []
    while segment >= 0:
        path.insert(0, segment)
        segment = sample.segments[segment].parent
    ids = [token for one in path for token in sample.segments[one].ids]
    before = sum(len(sample.segments[one].ids) for one in path[:-1])
    stop = before + sample.term_offset[terms[-1]] + 1
    row = torch.tensor(ids[:stop])
    logprobs = model(input_ids=row[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, row[1:, None])[-len(terms) :, 0]


def test_versions_of_an_adapter_have_equal_headers_so_that_one_can_be_a_patch_of_the_other(
    make_trainer, make_batch, tmp_path: Path
):
    trainer = make_trainer(lora=LORA)
    heads = []
    for step in range(6):
        path = tmp_path / f"1-{step}.safetensors"
        trainer.engine_weights(path)
        data = path.read_bytes()
        heads.append(data[: 8 + int.from_bytes(data[:8], "little")])
        trainer.step(make_batch(step))
    assert len(set(heads)) == 1
    assert read_config(path) == trainer.adapter.config


def test_a_base_whose_files_are_16_bit_is_the_same_base(make_trainer, make_batch, model_folder: Path, tmp_path: Path):
    """It is not read into float32 on the way; digest and log-probs are those of its float32 copy."""
    trainers = []
    for name, dtype in (("short", torch.bfloat16), ("long", torch.float32)):
        folder = tmp_path / name
        folder.mkdir()
        weights = load_file(model_folder / "model.safetensors")
        rounded = {key: weight.to(torch.bfloat16).to(dtype) for key, weight in weights.items()}
        save_file(rounded, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text((model_folder / "config.json").read_text())
        trainers.append(make_trainer(lora=LORA, model=folder, precision="bf16"))
    short, long = trainers
    assert short.adapter.base_digest == long.adapter.base_digest
    found = [[trainer.step(make_batch(seed)).digest for seed in range(2)] for trainer in trainers]
    assert found[0] == found[1]
    assert {name: w.dtype for name, w in copies(short).items()} == {name: w.dtype for name, w in copies(long).items()}


def test_the_configuration_names_what_was_set(make_trainer, model_folder: Path):
    config = make_trainer(lora=LORA | {"target_modules": ["v_proj", "q_proj"]}).adapter.config
    assert json.loads(json.dumps(config)) == config
    expected = {"r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    assert config | expected == config
    assert config["base_model_name_or_path"] == str(model_folder)
