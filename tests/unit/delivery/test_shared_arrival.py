"""Engines of a host fetch a version together: one brings it, and SIGKILL to any of them stops nobody else."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from made_weights import bfloat16, sha256, trained, weights_file

from agentjet.delivery.patch import encode_patch
from agentjet.schemas.ids import RunId
from agentjet.schemas.weights import Weights

SCRIPT = Path(__file__).parents[2] / "support" / "arriving_engine.py"
NUM_VERSIONS = 4


class Swarm:
    """Blobs of a first version and patches since, and processes that fetch them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.blobs, self._stack = folder / "weights", folder / "blobs", stack
        self.blobs.mkdir()
        rng = np.random.default_rng(0)
        master, records, self.names = rng.standard_normal(50_000) * 0.05, [], list[str]()
        base = None
        for step in range(NUM_VERSIONS):
            file = weights_file({"w": ("bfloat16", bfloat16(master))})
            self.names.append(sha256(file))
            patch = {}
            if base is None:
                (self.blobs / self.names[-1]).write_bytes(file.tobytes())
            else:
                data = encode_patch(base, file, base_sha256=self.names[-2], sha256=self.names[-1])
                digest = sha256(np.frombuffer(data, np.uint8))
                (self.blobs / digest).write_bytes(data)
                patch = {"base": f"1-{step - 1}", "patch_sha256": digest, "patch_bytes": len(data)}
            records.append(
                Weights(
                    run=RunId("run-aaaaaa"),
                    model="small",
                    version=f"1-{step}",
                    ledger_sequence=step + 1,
                    dtype="bfloat16",
                    num_bytes=len(file),
                    sha256=self.names[-1],
                    is_blob=base is None,
                    **patch,
                ).model_dump()
            )
            base, master = file, trained(master, 1e-5, rng)
        (self.blobs / "records.json").write_text(json.dumps(records))

    def engine(self, *point: str) -> "subprocess.Popen[str]":
        command = [sys.executable, str(SCRIPT), str(self.folder), str(self.blobs), *point]
        process = self._stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        self._stack.callback(process.kill)
        return process

    def files(self) -> set[str]:
        """What lies in the folder, but for the file of turns."""
        return {path.stem for path in self.folder.glob("*/*") if path.name != ".turn"}


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with ExitStack() as stack:
        yield Swarm(tmp_path, stack)


def ask(engine: "subprocess.Popen[str]", step: int) -> None:
    assert engine.stdin is not None
    engine.stdin.write(f"1-{step}\n")
    engine.stdin.flush()


def answer(engine: "subprocess.Popen[str]") -> tuple[str, int]:
    assert engine.stdout is not None
    name, num_applied = engine.stdout.readline().split()
    return name, int(num_applied)


def end(engine: "subprocess.Popen[str]") -> None:
    assert engine.stdin is not None
    engine.stdin.close()
    assert engine.wait() == 0


def test_each_version_is_decoded_once_for_all_engines_and_nothing_is_left(swarm: Swarm):
    engines = [swarm.engine() for _ in range(3)]
    for step in range(NUM_VERSIONS):
        for engine in engines:
            ask(engine, step)
        answers = [answer(engine) for engine in engines]
        assert [name for name, _ in answers] == [swarm.names[step]] * 3
        assert sum(num_applied for _, num_applied in answers) == (1 if step else 0)
    assert swarm.files() == {swarm.names[-1]}
    for engine in engines:
        end(engine)
    assert list(swarm.folder.iterdir()) == []


def test_an_engine_that_fell_behind_takes_the_newest_file_that_is_there(swarm: Swarm):
    ahead, behind = swarm.engine(), swarm.engine()
    ask(behind, 0)
    assert answer(behind) == (swarm.names[0], 0)
    for step in (1, 2):
        ask(ahead, step)
        assert answer(ahead) == (swarm.names[step], 1)
        assert swarm.files() == {swarm.names[0], swarm.names[step]}
    ask(behind, 3)
    assert answer(behind) == (swarm.names[3], 1)


@pytest.mark.parametrize("point", ["fetching", "decoding", "checking", "naming", "named"])
def test_a_process_killed_while_it_brings_a_version_leaves_that_to_the_next(swarm: Swarm, point: str):
    step = 0 if point == "fetching" else 2
    dying, others = swarm.engine(point), [swarm.engine() for _ in range(2)]
    ask(dying, step)
    assert dying.stdout is not None
    assert dying.stdout.readline() == "held\n"
    for engine in others:
        ask(engine, step)
    dying.kill()
    dying.wait()
    answers = [answer(engine) for engine in others]
    assert [name for name, _ in answers] == [swarm.names[step]] * 2
    # A file that had its name before the end is whole and of use.
    assert sum(num for _, num in answers) == (0 if point == "named" else step)
    for engine in others:
        ask(engine, 3)
        assert answer(engine)[0] == swarm.names[3]
    assert swarm.files() == {swarm.names[3]}


def test_a_process_killed_while_it_waits_for_another_is_not_missed(swarm: Swarm):
    bringing, waiting = swarm.engine("decoding"), swarm.engine()
    ask(bringing, 1)
    assert bringing.stdout is not None
    assert bringing.stdout.readline() == "held\n"
    ask(waiting, 1)
    waiting.kill()
    waiting.wait()
    bringing.kill()
    bringing.wait()
    last = swarm.engine()
    ask(last, 1)
    assert answer(last) == (swarm.names[1], 1)
    assert swarm.files() == {swarm.names[1]}


def test_what_a_dead_engine_held_is_of_use_to_the_one_that_takes_its_place(swarm: Swarm):
    first = swarm.engine()
    ask(first, 2)
    assert answer(first) == (swarm.names[2], 2)
    first.kill()
    first.wait()
    again = swarm.engine()
    ask(again, 2)
    assert answer(again) == (swarm.names[2], 0)
    ask(again, 3)
    assert answer(again) == (swarm.names[3], 1)
    assert swarm.files() == {swarm.names[3]}
