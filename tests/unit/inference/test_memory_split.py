import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from agentjet.config import EngineSettings, LearnerSettings, LoraSettings, ModelSettings
from agentjet.config.algorithm import AlgorithmSettings
from agentjet.errors import ConfigError
from agentjet.inference import vllm_launch
from agentjet.inference.memory_split import LearnerNeed, Split, adapter_parameters
from agentjet.inference.weight_file import Layout
from agentjet.pretrained import model_file
from agentjet.training.reference import FrozenCopy
from agentjet.training.trainer import Trainer

GIB = 1024**3
K3 = {"kl": "k3", "kl_coefficient": 0.1}
QWEN_7B = {"num_layers": 28, "hidden": 3584, "inner": 18944, "kv": 512, "vocab": 152064}
QWEN_32B = {"num_layers": 64, "hidden": 5120, "inner": 27648, "kv": 1024, "vocab": 152064}


def qwen(*, num_layers: int, hidden: int, inner: int, kv: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a Qwen2.5 model with an output head of its own."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(num_layers):
        place = f"model.layers.{layer}"
        shapes |= {
            f"{place}.self_attn.{name}.weight": (size, hidden) for name, size in {"k_proj": kv, "v_proj": kv}.items()
        }
        shapes |= {f"{place}.self_attn.{name}.weight": (hidden, hidden) for name in ("q_proj", "o_proj")}
        shapes |= {f"{place}.mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{place}.mlp.down_proj.weight": (hidden, inner), f"{place}.input_layernorm.weight": (hidden,)}
    return shapes


def plain(num_parameters: int) -> dict[str, tuple[int, ...]]:
    return {"model.layers.0.mlp.up_proj.weight": (1000, num_parameters // 1000)}


def test_half_a_billion_parameters_beside_their_engine_on_24_gib():
    need = LearnerNeed.of(ModelSettings(path="x", learner=LearnerSettings(activation_gib=4.0)))
    assert need.num_bytes(plain(494_000_000)) == 18 * 494_000_000 + 8 * GIB
    assert need.split(24 * GIB, plain(494_000_000)).share == pytest.approx(0.32, abs=0.005)


def test_a_reference_counts_where_it_lies_on_the_gpu():
    def need(rank: int = 0, precision: str = "auto", **algorithm: object) -> tuple[int, int]:
        of = ModelSettings(
            path="x",
            algorithm=AlgorithmSettings.model_validate(algorithm),
            learner=LearnerSettings.model_validate({"precision": precision}),
            lora=LoraSettings(rank=rank),
        )
        return LearnerNeed.of(of).matrix_bytes, LearnerNeed.of(of).other_bytes

    assert (need(), need(**K3), need(**K3, reference_device="cpu")) == ((18, 18), (20, 22), (18, 18))
    assert need(precision="float32", **K3) == (22, 22)
    assert (need(4), need(4, **K3)) == ((2, 4), (2, 4))


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_reference_holds_what_is_reckoned(precision: str):
    torch.set_num_threads(1)
    folder, shapes = tiny()
    learner = LearnerSettings.model_validate({"precision": precision, "device": "cpu"})
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    with FrozenCopy(folder, torch.device("cpu"), dtype, torch.device("cpu")).present() as model:
        held = sum(weight.nbytes for weight in model.parameters())
    with_it, without = (
        LearnerNeed.of(ModelSettings(path="x", learner=learner, algorithm=AlgorithmSettings.model_validate(algorithm)))
        for algorithm in (K3, {})
    )
    assert with_it.num_bytes(shapes) - without.num_bytes(shapes) == held


def tiny() -> tuple[Path, Mapping[str, tuple[int, ...]]]:
    """The preset's folder and its tensors."""
    folder = model_file.fetch("tiny")
    with torch.device("meta"):
        return folder, Layout.of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))).shapes


def test_the_cache_is_what_the_engine_s_weights_and_a_step_leave():
    def part(**engine: object) -> Split:
        settings = EngineSettings.model_validate({"kind": "vllm", "max_running": 128, "prefill_tokens": 8192} | engine)
        return LearnerNeed.of(ModelSettings(path="x", engine=settings)).split(80 * GIB, shapes)

    shapes = qwen(num_layers=24, hidden=896, inner=4864, kv=128, vocab=151936)
    size = sum(map(math.prod, shapes.values()))
    usual = part()
    step = 128 * 151936 * 4 * 4 + 8192 * 4864 * 4 * 2 + GIB
    assert usual.cache_bytes == pytest.approx(usual.share * 80 * GIB - 2 * size - step, abs=1)
    # Float32: the learner's share is the same, the engine's weights and rows are twice as large.
    wide = part(dtype="float32")
    assert (wide.share, usual.cache_bytes - wide.cache_bytes) == (usual.share, 2 * size + 8192 * 4864 * 4 * 2)
    assert part(max_running=256).cache_bytes < usual.cache_bytes


def test_vllm_is_given_its_part_of_the_gpu_unless_it_is_said(monkeypatch: pytest.MonkeyPatch):
    platform = SimpleNamespace(get_device_total_memory=lambda: 24 * GIB)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    need, layout = LearnerNeed.of(ModelSettings(path="x")), Layout(plain(494_000_000), {})
    part = need.split(24 * GIB, layout.shapes)
    given = {"gpu_memory_utilization": round(part.share, 3), "kv_cache_memory_bytes": part.cache_bytes}
    assert vllm_launch._part_of_gpu(need, layout, {"block_size": 32}) == given | {"block_size": 32}
    for said in ({"gpu_memory_utilization": 0.2}, {"kv_cache_memory_bytes": 5}):
        assert vllm_launch._part_of_gpu(need, layout, said) == said


def test_seven_billion_parameters_do_not_train_beside_their_engine_on_80_gib_but_their_adapter_does():
    with pytest.raises(ConfigError, match=r"of the GPU's 80\.0 GiB the learner may take 135\.\d, .* a GPU each"):
        LearnerNeed.of(ModelSettings(path="x")).split(80 * GIB, qwen(**QWEN_7B))
    need = LearnerNeed.of(ModelSettings(path="x", lora=LoraSettings(rank=32)))
    assert need.split(80 * GIB, qwen(**QWEN_7B)).share > 0.4


def test_the_adapter_s_parameters_are_those_that_the_documents_name():
    seven, thirty_two = (adapter_parameters(qwen(**of), LoraSettings(rank=32)) for of in (QWEN_7B, QWEN_32B))
    assert (round(seven / 1e6, 1), round(thirty_two / 1e6)) == (80.7, 268)
    need = LearnerNeed.of(ModelSettings(path="x", lora=LoraSettings(rank=32)))
    sizes = [(need.num_bytes(qwen(**of)) - need.fixed_bytes) / 1e9 for of in (QWEN_7B, QWEN_32B)]
    assert [round(size, 1) for size in sizes] == [18.9, 73.5]


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_learner_holds_no_more_than_is_reckoned(tmp_path, precision):
    """Weights, gradients and moments of a real one after a step's update."""
    torch.set_num_threads(1)
    folder, shapes = tiny()
    learner = LearnerSettings.model_validate({"precision": precision, "device": "cpu"})
    lora = LoraSettings(rank=8)
    trainer = Trainer(folder, learner, AlgorithmSettings(), lora=lora, engine_dtype="bfloat16")
    trained = list(trainer.weights.values())
    for weight in trained:
        weight.grad = torch.ones_like(weight)
    held = sum(weight.nbytes for weight in trainer.model.parameters()) + sum(weight.nbytes for weight in trained)
    trainer.optimizer.update()
    held += sum(
        state[key].nbytes for state in trainer.optimizer.adam.state.values() for key in ("exp_avg", "exp_avg_sq")
    )
    need = LearnerNeed.of(ModelSettings(path="x", learner=learner, lora=lora))
    copies = 2 * adapter_parameters(shapes, lora)
    assert need.num_bytes(shapes) - need.fixed_bytes == held + copies


@given(st.integers(10**7, 10**11), st.integers(1, 200), st.floats(0.5, 100), st.integers(0, 64))
def test_learner_and_engine_never_take_more_than_there_is(
    num_parameters: int, total_gib: int, activation_gib: float, rank: int
):
    lora = LoraSettings(rank=rank, target_modules=("down_proj",))
    need = LearnerNeed.of(ModelSettings(path="x", learner=LearnerSettings(activation_gib=activation_gib), lora=lora))
    total, shapes = total_gib * GIB, plain(num_parameters) | {"model.layers.0.mlp.down_proj.weight": (4096, 1024)}
    needed = need.engine.num_bytes(shapes, lora)
    assert needed > 2 * sum(map(math.prod, shapes.values()))
    try:
        part = need.split(total, shapes)
    except ConfigError:
        assert need.num_bytes(shapes) + 1.1 * needed > total * (1 - 1e-9)
        return
    assert need.num_bytes(shapes) + needed + part.cache_bytes == total
    assert part.cache_bytes >= 0.1 * needed * (1 - 1e-9)
    assert part.share * total == pytest.approx(needed + part.cache_bytes)
