import pytest
from pydantic import ValidationError

from agentjet.config import AlgorithmSettings, SwarmSettings
from agentjet.config.algorithm import PRESETS
from agentjet.config.load import config_digest, load
from agentjet.errors import ConfigError

FILE = """\
[models.policy]
path = "tiny"
[models.policy.algorithm]
preset = "dapo"
clip_high = 0.4
"""


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "none"])
def test_a_preset_fills_its_values_and_leaves_the_rest(preset):
    settings = AlgorithmSettings(preset=preset)
    assert {name: getattr(settings, name) for name in PRESETS[preset]} == PRESETS[preset]
    others = AlgorithmSettings.model_fields.keys() - PRESETS[preset].keys() - {"preset"}
    assert all(getattr(settings, name) == getattr(AlgorithmSettings(), name) for name in others)


def test_what_is_set_wins_over_the_preset():
    settings = AlgorithmSettings(preset="dapo", clip_high=0.4)
    assert (settings.clip_high, settings.clip_low, settings.aggregation) == (0.4, 0.2, "token_mean")


def test_a_preset_without_its_divergence_needs_no_second_key():
    assert AlgorithmSettings(preset="grpo", kl="none").kl_coefficient == 0.0


@pytest.mark.parametrize("preset", list(PRESETS))
def test_settings_written_down_in_full_are_read_back_unchanged(preset):
    settings = AlgorithmSettings(preset=preset)
    assert AlgorithmSettings.model_validate(settings.model_dump()) == settings


def test_every_preset_has_a_digest_of_its_own():
    digests = {
        config_digest(SwarmSettings.model_validate({"models": {"m": {"path": "p", "algorithm": {"preset": preset}}}}))
        for preset in PRESETS
    }
    assert len(digests) == len(PRESETS)


def test_shown_values_name_the_preset_they_come_from(tmp_path):
    (tmp_path / "swarm.toml").write_text(FILE)
    config = load(tmp_path / "swarm.toml", environment={})
    table = "models.policy.algorithm"
    assert config.settings.models["policy"].algorithm.overlong == "penalty"
    assert config.origins[f"{table}.overlong"] == "preset dapo"
    assert config.origins[f"{table}.clip_high"] == "swarm.toml:5"
    assert config.origins[f"{table}.std"] == "default"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kl": "k1"}, "kl_coefficient = 0 does nothing"),
        ({"kl_coefficient": 0.1}, 'kl = "none"'),
        ({"loss": "gspo", "aggregation": "token_mean"}, "weighs each call by its length.*sequence_mean"),
        ({"loss": "gspo", "aggregation": "token_mean", "sequence": "episode"}, "weighs each episode"),
        ({"loss": "gspo"}, 'aggregation = "episode" weighs each call by its length'),
        ({"proximal": "sampler"}, 'correction = "none"'),
        ({"proximal": "sampler", "correction": "none", "rejection": "sequence"}, 'rejection = "none"'),
        ({"correction": "icepop", "correction_floor": 2.0}, "below correction_cap"),
        ({"rejection": "geometric", "rejection_floor": 3.0}, "below rejection_cap"),
        ({"overlong": "penalty"}, "overlong_tokens"),
        ({"advantage": "rloo", "credit": "call"}, "compares whole episodes"),
        ({"advantage": "maxrl", "credit": "call"}, "compares whole episodes"),
        ({"discount": 0.9}, 'credit = "call"'),
        ({"advantage": "maxrl", "kl": "k1", "kl_coefficient": 0.1}, "rewards of 0 or more"),
    ],
)
def test_a_combination_that_means_nothing_is_refused_in_a_sentence(fields, words):
    with pytest.raises(ValidationError, match=words):
        AlgorithmSettings.model_validate(fields)


def test_gspo_takes_what_weighs_its_sequences_alike():
    assert AlgorithmSettings(loss="gspo", sequence="episode").aggregation == "episode"
    assert AlgorithmSettings(loss="gspo", aggregation="sequence_mean").sequence == "call"


def test_a_refused_combination_names_its_table_and_not_its_whole_content(tmp_path):
    (tmp_path / "swarm.toml").write_text(FILE.replace("clip_high = 0.4", 'kl = "k3"\nkl_coefficient = 0.0'))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "swarm.toml", environment={})
    assert str(caught.value) == (
        'swarm.toml line 3: models.policy.algorithm: kl = "k3" with kl_coefficient = 0 does nothing; '
        'set a coefficient, or kl = "none"'
    )
