"""Real SIGKILL to everything that runs: nothing is lost, nothing counted twice, the same bits come out of the log.

The short form of `benchmarks/chaos.py`, which it runs.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT_SECONDS = 900
"""Against a hang only: a run takes about a minute, and several on a machine that does other things."""
CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
ACTORS = {"curriculum", "inference", "learner", "merger", "reward", "rollout", "checkpoint", "server"}


def chaos(folder: Path, **options: int) -> tuple[int, dict[str, Any]]:
    """Exit code and figures."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(CHAOS), "--json", "--dir", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS - 20, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_is_killed_every_ticket_is_settled_once(tmp_path: Path, seed: int):
    code, figures = chaos(tmp_path / "run", kills=20, steps=10, seed=seed)
    assert figures["open"] == 0
    assert figures["lost"] == figures["duplicated"] == 0, figures["problems"]
    assert figures["replay_identical"]
    assert figures["steps"] == 10
    assert figures["kills"] > 15  # a fast run ends before the last ones
    assert set(figures["kills_by_actor"]) >= ACTORS
    assert figures["left_over"] == []
    assert code == 0
