import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.config import ModelSettings
from agentjet.config.algorithm import AlgorithmSettings
from agentjet.config.settings import LearnerSettings
from agentjet.errors import ConfigError
from agentjet.inference.memory_split import LearnerNeed

GIB = 1024**3


def test_half_a_billion_parameters_beside_their_engine_on_24_gib():
    need = LearnerNeed.of(ModelSettings(path="x", learner=LearnerSettings(activation_gib=4.0)))
    assert need.num_bytes(494_000_000) == 18 * 494_000_000 + 8 * GIB
    assert need.engine_share(24 * GIB, 494_000_000) == pytest.approx(0.32, abs=0.005)


def test_a_reference_counts_where_it_lies_on_the_gpu():
    def need(**algorithm: object) -> int:
        return LearnerNeed.of(
            ModelSettings(path="x", algorithm=AlgorithmSettings.model_validate(algorithm))
        ).bytes_per_parameter

    assert (need(), need(kl="k3", kl_coefficient=0.1), need(kl="k3", kl_coefficient=0.1, reference_device="cpu")) == (
        18,
        22,
        18,
    )


def test_seven_billion_parameters_do_not_train_beside_their_engine_on_80_gib():
    with pytest.raises(ConfigError, match=r"of the GPU's 80\.0 GiB the learner may take 135\.\d, .* a GPU each"):
        LearnerNeed.of(ModelSettings(path="x")).engine_share(80 * GIB, 7_600_000_000)


@given(st.integers(10**7, 10**11), st.integers(1, 200), st.floats(0.5, 100))
def test_learner_and_engine_never_take_more_than_there_is(num_parameters: int, total_gib: int, activation_gib: float):
    need = LearnerNeed.of(ModelSettings(path="x", learner=LearnerSettings(activation_gib=activation_gib)))
    total = total_gib * GIB
    try:
        share = need.engine_share(total, num_parameters)
    except ConfigError:
        assert need.num_bytes(num_parameters) + 2.2 * num_parameters > total
        return
    assert share * total + need.num_bytes(num_parameters) <= total * (1 + 1e-9)
    assert share * total >= 2 * num_parameters
