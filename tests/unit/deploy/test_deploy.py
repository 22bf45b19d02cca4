import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agentjet.actors.supervisor import actor_specs
from agentjet.bus.server import find_binary
from agentjet.config.load import load

DEPLOY = Path(__file__).parents[3] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
TOMLS = sorted(DEPLOY.glob("*.toml"))
ACTORS = Path(__file__).parents[3] / "src/agentjet/actors"
HARDENING = (
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "SystemCallFilter=@system-service",
    "RestrictNamespaces=yes",
    "UMask=0077",
)


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: path.name)
def test_example_configuration_is_valid(path):
    assert load(path, environment={}).settings.models


def test_three_examples_are_there():
    assert [path.name for path in TOMLS] == ["swarm.7b-32b.toml", "swarm.gpu.toml", "swarm.laptop.toml"]


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: path.name)
def test_streams_of_an_example_fit_the_store(path):
    settings = load(path, environment={}).settings
    if settings.nats.url == "embedded":
        assert settings.streams.max_gib < settings.nats.store_gib


def test_laptop_example_finds_its_agent():
    pool = load(DEPLOY / "swarm.laptop.toml", environment={}).settings.pools["guess"]
    assert Path(pool.workflow.rpartition(":")[0]).resolve().is_file()


def verified(paths: list[Path]) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed (apt-get install systemd)")
    return subprocess.run([tool, "verify", *map(str, paths)], capture_output=True, text=True, timeout=60)


def test_units_pass_systemd_analyze():
    done = verified([*UNITS, DEPLOY / "systemd/agentjet.target"])
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_misspelt_unit_would_be_noticed(tmp_path):
    unit = tmp_path / "agentjet-broken@.service"
    unit.write_text(UNITS[0].read_text().replace("ProtectHome=", "ProtectHouse="))
    done = verified([unit])
    assert "ProtectHouse" in done.stdout + done.stderr


def test_every_actor_has_a_templated_unit():
    actors = {path.stem for path in ACTORS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    actors |= {spec.kind for spec in actor_specs(load(DEPLOY / "swarm.laptop.toml", environment={}).settings)}
    assert {f"agentjet-{actor}@.service" for actor in actors} == {path.name for path in UNITS} - {
        "agentjet-nats@.service"
    }


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_is_hardened_and_starts_what_it_is_named_after(path):
    lines = path.read_text().splitlines()
    assert [line for line in HARDENING if line not in lines] == []
    assert not any(line.startswith("User=root") for line in lines)
    kind = re.fullmatch(r"agentjet-(\w+)@.service", path.name)
    assert kind is not None
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    wanted = "nats-server" if kind[1] == "nats" else f"agentjet.actors.{kind[1]} "
    assert wanted in start
    assert ("--model %i" in start) == (kind[1] in {"learner", "inference"})


def test_secret_reaches_curriculum_and_inference_only():
    holders = {path.name for path in UNITS if "secret.env" in path.read_text()}
    assert holders == {"agentjet-curriculum@.service", "agentjet-inference@.service"}


def test_server_configuration_is_valid(tmp_path):
    text = (DEPLOY / "nats.conf").read_text().replace("/var/lib/agentjet-nats", str(tmp_path))
    (tmp_path / "nats.conf").write_text(text)
    done = subprocess.run(
        [find_binary(), "-t", "-c", str(tmp_path / "nats.conf")],
        capture_output=True,
        text=True,
        env=os.environ | {"NATS_PASSWORD": "x"},
    )
    assert done.returncode == 0, done.stderr
