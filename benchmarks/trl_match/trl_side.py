"""Runs TRL's side (`train.py`) in its own environment and reads the steps that it prints."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from trl_match import environment
from trl_match.match import GIVE_UP_SECONDS, GROUPS, LEARNING_RATE, MAX_TOKENS, MEMBERS, TEMPERATURE, VALID, Match, Step

import agentjet

WHOLE = GROUPS * MEMBERS
"""Rows of a batch."""


class Way(NamedTuple):
    """How TRL computes."""

    dtype: str
    """`float32` or `bfloat16` weights, or `autocast`: float32 weights, computed in bfloat16."""
    rows: int
    """Of one forward pass; the gradients of a batch are accumulated."""

    @property
    def learns(self) -> bool:
        """Whether an update of this size moves its weights: 98 % of the model's are too coarse in bfloat16."""
        return self.dtype != "bfloat16"


WAYS = (
    Way("float32", WHOLE),
    Way("float32", MEMBERS),
    Way("autocast", WHOLE),
    Way("autocast", MEMBERS),
    Way("bfloat16", WHOLE),
)


async def play_trl(match: Match, way: Way) -> list[Step]:
    """TRL's steps; RuntimeError when it fails."""
    command, launched = _command(match, way), time.time()
    source = str(Path(agentjet.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    log = match.folder / f"trl-{way.dtype}-{way.rows}.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                steps = [trl_step(line, launched) async for line in process.stdout if line.startswith(b'{"step"')]
                code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if code:
        raise RuntimeError(f"TRL's side ended with {code}; see {log}")
    return steps


def _command(match: Match, way: Way) -> list[str]:
    tasks = match.folder / "tasks.json"
    tasks.write_text(json.dumps(match.tasks()), "utf-8")
    options = {
        "model": match.model,
        "agent": match.agent,
        "tasks": tasks,
        "dir": match.folder / "trl",
        "seed": match.seed,
        "updates": match.updates,
        "groups": GROUPS,
        "members": MEMBERS,
        "learning-rate": LEARNING_RATE,
        "max-tokens": MAX_TOKENS,
        "temperature": TEMPERATURE,
        "threads": os.cpu_count() or 1,
        "stop-at": VALID,
        "dtype": way.dtype,
        "micro-batch": way.rows,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [str(environment.python()), str(environment.HERE / "train.py"), *words]


def trl_step(line: bytes, launched: float) -> Step:
    """A line of `trl_match/train.py`, at the moment it arrives."""
    said = json.loads(line)
    return Step(
        seconds=said["seconds"],
        whole_seconds=time.time() - launched,
        cpu_seconds=said["cpu_seconds"],
        valid_ratio=said["valid_ratio"],
        reward=said["reward"],
        trained_tokens=said["trained_tokens"],
    )
