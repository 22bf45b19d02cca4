"""The README's code, run as it stands."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
AGENTJET = str(Path(sys.executable).with_name("agentjet"))
CONFIG = f"""
[run]
dir = "run"
num_steps = 1
[models.small]
path = "tiny"
[models.small.learner]
batch_groups = 1
[pools.guess]
tasks = "{ROOT}/examples/guess/agent.py:tasks"
{{workflow}}
group_size = 2
sampling = {{{{ max_tokens = 2 }}}}
"""


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def wait_for_url(folder: Path, seconds: float = 30.0) -> str:
    give_up = time.monotonic() + seconds
    while not (folder / "server.json").exists():
        assert time.monotonic() < give_up, "no server was announced"
        time.sleep(0.1)
    return json.loads((folder / "server.json").read_text())["url"]


def test_the_client_of_the_readme_plays_a_run_to_its_end(tmp_path: Path):
    (client,) = [block for block in code_blocks() if "SwarmClient" in block]
    config = tmp_path / "swarm.toml"
    config.write_text(CONFIG.format(workflow=""))
    up = subprocess.Popen([AGENTJET, "up", "--config", str(config)], stderr=subprocess.PIPE, text=True)
    url = wait_for_url(tmp_path / "run")
    (tmp_path / "client.py").write_text(client.replace("nats://127.0.0.1:4222", url))
    player = subprocess.Popen([sys.executable, str(tmp_path / "client.py")], stderr=subprocess.PIPE, text=True)
    try:
        _, said = up.communicate(timeout=90)
        assert up.returncode == 0, said
    finally:
        player.terminate()
        _, complaint = player.communicate(timeout=20)
        up.kill()
    assert (tmp_path / "run" / "checkpoints" / "small" / "1-1").is_dir(), complaint


def test_the_workflow_of_the_readme_trains(tmp_path: Path):
    (agent,) = [block for block in code_blocks() if "async def run(task, policy)" in block]
    (tmp_path / "agent.py").write_text(agent)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    text = CONFIG.format(workflow='workflow = "agent.py:run"')
    (tmp_path / "swarm.toml").write_text(re.sub(r'tasks = ".*"', 'tasks = "tasks.jsonl"', text))
    words = [AGENTJET, "up", "--config", str(tmp_path / "swarm.toml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
