from pathlib import Path

import pytest

from agentjet.config import ModelSettings, RunSettings, SwarmSettings
from agentjet.config.load import config_digest, load, shown_values
from agentjet.errors import ConfigError

FILE = """\
# a comment
[run]
name = "guess"
dir = "out"

[models.Small]
path = "tiny"
learner = { learning_rate = 1e-3 }

[models.Small.engine]
dtype = "float32"

[pools.guess]
workflow = "agent.py:run"
tasks = "tasks.jsonl"
reward = "judge.module:score"
sampling.stop = [
  "a",
  "]",
]
sampling.temperature = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "swarm.toml"
    path.write_text(FILE)
    return path


def loaded(path: Path, text: str, **arguments):
    path.write_text(text)
    return load(path, environment={}, **arguments)


def refusal(path: Path, text: str, **arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(path, text, **arguments)
    return str(caught.value)


def test_values_know_the_line_they_come_from(file):
    config = load(file, environment={})
    assert config.origins["run.name"] == "swarm.toml:3"
    assert config.origins["models.Small.learner.learning_rate"] == "swarm.toml:8"
    assert config.origins["models.Small.engine.dtype"] == "swarm.toml:11"
    assert config.origins["pools.guess.sampling.temperature"] == "swarm.toml:21"
    assert config.origins["run.seed"] == "default"
    assert config.settings.pools["guess"].sampling.stop == ("a", "]")


def test_every_shown_value_has_an_origin(file):
    config = load(file, environment={})
    assert set(shown_values(config.settings)) == set(config.origins)


def test_set_beats_environment_beats_file(file):
    environment = {"AGENTJET_RUN__NAME": "env", "AGENTJET_RUN__SEED": "5"}
    config = load(file, {"run.seed": "7"}, environment=environment)
    assert (config.settings.run.name, config.settings.run.seed) == ("env", 7)
    assert config.origins["run.name"] == "env AGENTJET_RUN__NAME"
    assert config.origins["run.seed"] == "--set"


def test_text_becomes_the_type_of_the_field(file):
    environment = {
        "AGENTJET_MODELS__SMALL__LEARNER__LEARNING_RATE": "2e-4",
        "AGENTJET_POOLS__GUESS__SAMPLING__TEMPERATURE": "0.5",
        "AGENTJET_POOLS__GUESS__MODELS": '["Small"]',
        "AGENTJET_POOLS__GUESS__IS_SHUFFLED": "false",
    }
    settings = load(file, environment=environment).settings
    assert list(settings.models) == ["Small"]  # the file's case stays
    assert settings.models["Small"].learner.learning_rate == 2e-4
    assert settings.models["Small"].path == "tiny"
    pool = settings.pools["guess"]
    assert (pool.sampling.temperature, pool.models, pool.is_shuffled) == (0.5, ("Small",), False)


def test_paths_start_from_the_files_folder(file, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_text("{}")
    settings = load(file, {"models.other.path": "tiny"}, environment={}).settings
    assert settings.run.dir == tmp_path / "out"
    assert settings.pools["guess"].workflow == f"{tmp_path}/agent.py:run"
    assert settings.pools["guess"].tasks == f"{tmp_path}/tasks.jsonl"
    assert settings.pools["guess"].reward == "judge.module:score"
    assert settings.models["Small"].path == "tiny"
    folder = loaded(file, '[models.m]\npath = "weights"').settings
    assert folder.models["m"].path == str(tmp_path / "weights")


def test_a_group_judge_is_a_file_beside_the_swarm_toml_and_excludes_a_reward_function(file):
    of = "[pools.guess]\ngroup_judge = 'judge.py:judge'\n"
    settings = loaded(file, of).settings
    assert settings.pools["guess"].group_judge == f"{file.parent}/judge.py:judge"
    assert refusal(file, of + "reward = 'reward.py:score'\n") == (
        "swarm.toml line 2: pools.guess.group_judge: the pool also has the reward function "
        f"'{file.parent}/reward.py:score'; keep one of the two"
    )


def test_paths_of_the_command_line_start_from_the_working_directory(file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(file, {"run.dir": "here"}, environment={}).settings.run.dir == elsewhere / "here"


def test_default_run_folder_lies_beside_the_file(tmp_path):
    assert loaded(tmp_path / "s.toml", "").settings.run.dir == tmp_path / "runs/default"


def test_no_file_takes_the_one_in_the_working_directory(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load(None, environment={}).path == file


def test_no_file_at_all_gives_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(None, environment={})
    assert config.settings.nats.url == "embedded"
    assert config.path is None


def test_misspelt_key_names_line_and_nearest(file):
    text = '[models.x]\npath = "tiny"\n[models.x.learner]\nlearing_rate = 1\n'
    assert refusal(file, text) == (
        "swarm.toml line 4: [models.x.learner] has no key 'learing_rate'; did you mean 'learning_rate'?"
    )


def test_unlike_key_lists_what_there_is(file):
    assert refusal(file, "[rollout]\nzzz = 1") == (
        "swarm.toml line 2: [rollout] has no key 'zzz'; it takes num_workers, max_running"
    )


def test_misspelt_section_names_the_nearest(file):
    assert refusal(file, "[modles.x]\npath = 'a'") == (
        "swarm.toml line 1: there is no section 'modles'; did you mean 'models'?"
    )


def test_wrong_value_names_line_and_value(file):
    message = refusal(file, '[models.x]\npath = "a"\n\nlearner.learning_rate = -1\n')
    assert message == "swarm.toml line 4: models.x.learner.learning_rate: input should be greater than 0 (given: -1)"


def test_lacking_key_names_its_table(file):
    assert refusal(file, "[run]\n[models.x]\n") == "swarm.toml line 2: [models.x] lacks 'path'"


def test_check_of_the_whole_file_has_a_line(file):
    message = refusal(file, '[models.a]\npath = "a"\n[pools.p]\nmodels = ["b"]\n')
    assert message == "swarm.toml line 4: pools.p.models: there is no [models.b]"


def test_syntax_error_has_its_line(file):
    assert refusal(file, "[run]\nseed = \n").startswith("swarm.toml is not valid TOML: Invalid value (at line 2")


def test_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file; give the right one"):
        load(tmp_path / "absent.toml", environment={})


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "swarm.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path, environment={})


def test_several_errors_are_counted(file):
    assert refusal(file, "[run]\na = 1\nb = 2\n").endswith("(and 1 more)")


@pytest.mark.parametrize("name", ["AGENTJET_SECRET", "AGENTJET_CACHE", "AGENTJET_RUN", "OTHER_RUN__SED"])
def test_variables_of_others_are_no_settings(name):
    load(None, environment={name: "x"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AGENTJET_RUN__SED", "env AGENTJET_RUN__SED: [run] has no key 'sed'; did you mean 'seed'?"),
        ("AGENTJET_RUM__SEED", "env AGENTJET_RUM__SEED: there is no section 'rum'; did you mean 'run'?"),
        ("AGENTJET_RUN__SEED", "env AGENTJET_RUN__SEED: run.seed: input should be a valid integer"),
    ],
)
def test_misspelt_variable_is_flagged(name, said):
    with pytest.raises(ConfigError) as caught:
        load(None, environment={name: "x"})
    assert str(caught.value).startswith(said)


def test_broken_json_in_a_variable_is_one_sentence():
    with pytest.raises(ConfigError, match="AGENTJET_POOLS__P__MODELS is not JSON"):
        load(None, environment={"AGENTJET_POOLS__P__MODELS": "[a"})


def test_misspelt_override_is_flagged():
    with pytest.raises(ConfigError, match=r"--set: \[run\] has no key 'sed'"):
        load(None, {"run.sed": "1"}, environment={})


def test_secrets_are_not_shown(file):
    settings = load(file, {"nats.password": "hush", "nats.token": "hush"}, environment={}).settings
    assert settings.nats.password.get_secret_value() == "hush"
    assert "hush" not in repr(shown_values(settings)) + repr(settings)


def test_wrong_secret_is_not_quoted_back(file):
    assert "hush" not in refusal(file, "[nats]\npassword = ['hush']\n")


def test_digest_covers_what_is_computed_only():
    base = SwarmSettings(models={"a": ModelSettings(path="tiny")})
    elsewhere = base.model_copy(update={"run": RunSettings(dir=Path("/else"), id="x-abcdef")})
    other = base.model_copy(update={"run": RunSettings(seed=1)})
    assert config_digest(base) == config_digest(elsewhere) != config_digest(other)
    assert config_digest(SwarmSettings()) == config_digest(SwarmSettings())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_the_gateway_listens_on_the_loopback(file, host):
    assert loaded(file, f'[gateway]\nhost = "{host}"\n').settings.gateway.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "trainer.example", ""])
def test_a_gateway_that_is_open_to_other_machines_has_to_be_meant(file, host):
    assert "set gateway.allow_remote = true" in refusal(file, f'[gateway]\nhost = "{host}"\n')
    remote = loaded(file, f'[gateway]\nhost = "{host}"\nallow_remote = true\n')
    assert remote.settings.gateway.host == host


def test_keys_are_kept_over_whole_weights_only(file: Path):
    model = '[models.m]\npath = "tiny"\nengine = { keep_kv = true }\n'
    assert loaded(file, model).settings.models["m"].engine.keep_kv
    assert "engine.keep_kv is for whole weights" in refusal(file, model + "lora = { rank = 4 }\n")


def test_one_engine_shares_the_gpu_of_a_learner(file: Path):
    model = '[models.m]\npath = "tiny"\nengine = { kind = "vllm", is_colocated = true }\n'
    assert loaded(file, model).settings.models["m"].engine.is_colocated
    assert "num_engines is 2; set it to 1" in refusal(file, model + "num_engines = 2\n")
    assert "no learner shares its GPU" in refusal(file, model + "is_trained = false\n")


def test_an_adapter_needs_room_beside_the_one_before(file: Path):
    assert "models.m.lora.num_versions" in refusal(file, '[models.m]\npath = "tiny"\nlora = { num_versions = 1 }\n')


def test_options_of_vllm_are_a_free_table_for_vllm_only(file: Path):
    model = '[models.m]\npath = "tiny"\n[models.m.engine]\nkind = "vllm"\nvllm = { tensor_parallel_size = 2 }\n'
    assert loaded(file, model).settings.models["m"].engine.vllm == {"tensor_parallel_size": 2}
    for line, name in (("vllm = { seed = 2 }", "vllm"), ("is_colocated = true", "is_colocated")):
        said = refusal(file, f'[models.m]\npath = "tiny"\n[models.m.engine]\n{line}\n')
        assert said.endswith(f'models.m.engine: {name} is for vLLM; set kind = "vllm", or leave {name} out')
