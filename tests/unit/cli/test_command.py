"""Commands that need no server."""

import base64
import hashlib
import json
from pathlib import Path

import pytest

from agentjet.cli.decode import record_of_file, with_text
from agentjet.cli.doctor import Grade, _disk, _port
from agentjet.cli.evaluate import lines as evaluation_lines
from agentjet.cli.main import run
from agentjet.cli.output import write_json
from agentjet.config import GatewaySettings, RunSettings, StreamSettings, SwarmSettings
from agentjet.config.place import RunPlace
from agentjet.errors import RecordError, UsageError
from agentjet.schemas.claim import ClaimRequest
from agentjet.schemas.codec import encode
from agentjet.schemas.ids import RunId

CLAIM = ClaimRequest(run=RunId("r-1"), ticket="g-0.0.0", worker="w")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output(capsys, *words: str, code: int = 0) -> str:
    assert run(words) == code
    return capsys.readouterr().out


def test_config_show_says_where_values_come_from(folder, capsys, monkeypatch):
    (folder / "swarm.toml").write_text('[models.m]\npath = "tiny"\n')
    monkeypatch.setenv("AGENTJET_RUN__SEED", "7")
    shown = output(capsys, "config", "show", "--changed", "--set", "run.name=x").splitlines()
    assert [line.split("# ") for line in shown] == [
        ["run.name = 'x'          ", "--set"],
        ["run.seed = 7            ", "env AGENTJET_RUN__SEED"],
        ["models.m.path = 'tiny'  ", "swarm.toml:2"],
    ]


def test_config_show_as_json_masks_secrets(folder, capsys):
    shown = json.loads(output(capsys, "config", "show", "--json", "--set", "nats.password=hush"))
    assert shown["nats.password"] == {"value": "**********", "origin": "--set"}
    assert shown["run.seed"] == {"value": 0, "origin": "default"}


def test_config_check_counts_what_it_found(folder, capsys):
    (folder / "swarm.toml").write_text('[models.m]\npath = "tiny"\n[pools.a]\n[pools.b]\n')
    assert output(capsys, "config", "check") == "swarm.toml is valid: 1 model, 2 pools\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[models.m]\npath = "./absent"', "absent"),
        ('[pools.p]\nworkflow = "agent.py:run"', "pools.p.workflow: there is no file"),
        ('[pools.p]\ntasks = "tasks.jsonl"', "pools.p.tasks: there is no file"),
        ('[models.m]\npath = "tiny"\ntool_parser = "lama"', "models.m.tool_parser: 'lama' is not known"),
        ('[models.m]\npath = "tiny"\ntool_parser = "vllm:lama"', "models.m.tool_parser: "),
        ('[models.m]\npath = "tiny"\nengine = { kind = "vllm", vllm = { colour = 1 } }', "models.m.engine."),
    ],
)
def test_config_check_finds_missing_files(folder, capsys, text, said):
    (folder / "swarm.toml").write_text(text)
    assert run(["config", "check"]) == 0
    assert run(["config", "check", "--files"]) == 1
    assert said in capsys.readouterr().err


def test_config_check_without_a_file_is_an_error(capsys):
    assert run(["config", "check"]) == 1
    assert "there is no swarm.toml here; name one with --config" in capsys.readouterr().err


def test_decode_of_a_raw_body(folder, capsys):
    (folder / "body").write_bytes(encode(CLAIM)[1])
    shown = json.loads(output(capsys, "decode", "body", "--schema", "claim_request"))
    assert shown == {"schema": "claim_request/1.0", "run": "r-1", "ticket": "g-0.0.0", "worker": "w"}


def test_decode_of_what_the_nats_command_prints():
    headers, body = encode(CLAIM)
    lines = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    printed = {"subject": "x", "seq": 3, "hdrs": base64.b64encode(lines.encode()).decode()}
    printed["data"] = base64.b64encode(body).decode()
    assert record_of_file(json.dumps(printed).encode()) == CLAIM


def test_decode_of_a_body_without_a_schema_lists_them():
    with pytest.raises(UsageError, match="one of authorization, authorize_request"):
        record_of_file(encode(CLAIM)[1])


def test_decode_of_noise_is_a_named_error():
    with pytest.raises(RecordError, match="not msgpack"):
        record_of_file(b"\xc1", "call")


@pytest.mark.parametrize(
    "words", [["--stream", "CALLS"], ["--seq", "3"], ["--stream", "CALL", "--seq", "1"], ["--text", "x"]]
)
def test_decode_refuses_half_a_question(words):
    assert run(["decode", *words]) == 2


def test_decode_of_an_absent_file_is_one_sentence(capsys):
    assert run(["decode", "absent"]) == 1
    assert "absent can not be read" in capsys.readouterr().err


def test_text_stands_beside_token_ids(folder, monkeypatch):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    (folder / "m").mkdir()
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "m/tokenizer.json"))
    monkeypatch.setattr("agentjet.pretrained.model_file.resolve", lambda name: folder / name)
    shown = with_text({"prompt_ids": [0, 1], "segments": [{"ids": [1]}], "num": 1}, "m")
    assert shown["prompt_ids_text"] == "a b"
    assert shown["segments"][0]["ids_text"] == "b"


def checkpoint(folder: Path, version: str) -> Path:
    path = folder / "run/checkpoints/m" / version
    path.mkdir(parents=True)
    incarnation, step = map(int, version.split("-"))
    extra = {"version": version, "step": step, "incarnation": incarnation}
    (path / "state.json").write_text(json.dumps({"extra": extra}))
    for name in ("model.safetensors", "config.json"):
        (path / name).write_bytes(b"{}")
    files = [
        {"name": file.name, "num_bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in path.iterdir()
    ]
    (path / "manifest.json").write_text(json.dumps({"files": files}))
    return path


def test_checkpoints_are_listed_verified_and_exported(folder, capsys):
    checkpoint(folder, "1-2")
    checkpoint(folder, "1-4")
    rows = json.loads(output(capsys, "checkpoint", "ls", "--dir", "run", "--json"))
    assert [(row["version"], row["step"], row["error"]) for row in rows] == [("1-2", 2, None), ("1-4", 4, None)]
    assert "m/1-2" in output(capsys, "checkpoint", "ls", "--dir", "run")
    assert output(capsys, "checkpoint", "verify", "--dir", "run").count("ok ") == 2
    output(capsys, "checkpoint", "export", "m/1-2", "out", "--dir", "run")
    assert (folder / "out/model.safetensors").exists()


def test_damaged_checkpoint_is_exit_code_1_after_all_were_read(folder, capsys):
    (checkpoint(folder, "1-2") / "config.json").write_bytes(b"[]")
    checkpoint(folder, "1-4")
    shown = output(capsys, "checkpoint", "verify", "--dir", "run", code=1)
    assert "config.json is damaged" in shown
    assert "ok " in shown


def test_export_looks_at_its_target_before_it_reads(folder, capsys):
    (checkpoint(folder, "1-2") / "config.json").write_bytes(b"[]")
    (folder / "out").mkdir()
    (folder / "out/x").touch()
    assert run(["checkpoint", "export", "m/1-2", "out", "--dir", "run"]) == 1
    assert "out is there already" in capsys.readouterr().err


def test_checkpoint_of_another_run_names_those_there_are(folder, capsys):
    assert run(["checkpoint", "export", "m", "out", "--dir", "run"]) == 1
    assert "run/checkpoints holds no checkpoints; say with --config or --dir" in capsys.readouterr().err
    checkpoint(folder, "1-2")
    assert run(["checkpoint", "export", "m/1-3", "out", "--dir", "run"]) == 1
    assert "there is no checkpoint 'm/1-3' in" in capsys.readouterr().err


def test_checkpoints_of_no_run_hint_at_the_options(folder, capsys):
    RunPlace(folder / "runs/.hidden/x").begin("x")
    shown = output(capsys, "checkpoint", "ls")
    assert "there is no run in" in shown
    assert "say with --config or --dir which run is meant" in shown


def test_no_checkpoint_is_one_sentence(capsys):
    assert run(["checkpoint", "verify", "--dir", "run"]) == 1
    assert "there is no checkpoint in" in capsys.readouterr().err


def test_models_are_listed(folder, capsys, monkeypatch):
    monkeypatch.setenv("AGENTJET_CACHE", str(folder / "cache"))
    assert json.loads(output(capsys, "model", "ls", "--json")) == {"smollm2-135m": None, "tiny": None}
    assert "not fetched yet" in output(capsys, "model", "ls")


def test_unknown_model_is_one_sentence(capsys):
    assert run(["model", "fetch", "gpt-7"]) == 1
    assert "there are smollm2-135m, tiny" in capsys.readouterr().err


def test_doctor_warns_of_a_small_disk(folder):
    settings = SwarmSettings(run=RunSettings(dir=folder / "a/b"), streams=StreamSettings(max_gib=10**9))
    assert _disk(settings).grade is Grade.WARN
    assert "lower streams.max_gib" in _disk(settings).detail


def test_doctor_names_a_port_in_use():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = SwarmSettings(gateway=GatewaySettings(port=taken.getsockname()[1]))
        assert _port(settings).grade is Grade.FAIL
    assert _port(SwarmSettings()).grade is Grade.OK


def test_list_of_numbers_is_one_line(capsys):
    value = {"ids": [1, -2, 3.5e-9], "text": "[\n  1\n]", "rest": ["a", [], [1], [None]]}
    write_json(value)
    shown = capsys.readouterr().out
    assert '"ids": [1, -2, 3.5e-9],\n' in shown
    assert json.loads(shown) == value


def test_evaluation_reads_for_people():
    report = {"checkpoint": "c", "version": "1-60", "num_scored": 7, "reward_mean": 0.8571428571428571, "faults": []}
    assert [line.split() for line in evaluation_lines(report)] == [
        ["checkpoint", "c"],
        ["version", "1-60"],
        ["num_scored", "7"],
        ["reward_mean", "0.8571"],
    ]
    failed = report | {"reward_mean": None, "faults": ["ValueError: boom"]}
    assert evaluation_lines(failed)[-2:] == ["reward_mean          none: no episode was scored", "! ValueError: boom"]
