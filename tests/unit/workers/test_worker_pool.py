"""Real processes: what user code does to its process befalls one piece of work only."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from agentjet.errors import WorkflowError
from agentjet.workers.nursery import Nursery
from agentjet.workers.pool import WorkerPool

CODE = """
import asyncio, os, signal, subprocess, sys, threading, time
from agentjet.errors import AbortError
LEAK = []

async def run(task, policy):
    policy.log({"pid": os.getpid()})
    match task.get("do"):
        case "exit": os._exit(3)
        case "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        case "loop":
            while True: pass
        case "raise": raise KeyError("no such tool")
        case "sysexit": sys.exit(4)
        case "abort": policy.abort("the site is down")
        case "leak": LEAK.append(bytearray(300 << 20))
        case "leave a task": LEAK.append(asyncio.create_task(asyncio.sleep(1000)))
        case "object": return {"result": object()}
        case "large number": return {"result": 2**70}
        case "grandchild":
            child = subprocess.Popen(["sleep", "100"])
            policy.log({"child": child.pid})
            os._exit(1)
        case "threads":
            lines = [{"text": str(index) * 300_000} for index in range(8)]
            say = lambda line: [policy.log(line) for _ in range(9)]
            threads = [threading.Thread(target=say, args=[line]) for line in lines]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
        case "late thread": threading.Timer(0.2, policy.log, [{"pid": -1}]).start()
        case "tasks": return float(len(asyncio.all_tasks()))
        case "sleep": await asyncio.sleep(task["seconds"])
        case "env": return {"result": [name for name in os.environ if name.startswith("AGENTJET_")]}
    return 1.0

def plain(task, policy):
    return {"reward": 0.5, "metrics": {"turns": 2}}

async def half():
    await asyncio.sleep(0)
    return 0.5

def loops(task, policy):
    return asyncio.run(half())

def passes_on(task, policy):
    return half()
"""

ADAPTER = "agentjet.rollout.workflow:play"


@contextlib.asynccontextmanager
async def open_pool(entry: str, **options: int) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(entry, **{"adapter": ADAPTER, "max_running": 8} | options)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(CODE)
    return path


@pytest.fixture
async def pool(agent: Path) -> AsyncIterator[WorkerPool]:
    async with open_pool(f"{agent}:run") as pool:
        yield pool


def payload(**task: object) -> dict[str, object]:
    return {"task": task, "policy": {"base_url": "http://x/v1", "api_key": "k", "models": ["m"]}}


async def play(pool: WorkerPool, timeout_seconds: float = 10.0, **task: object):
    messages: list[dict[str, int]] = []
    done = await pool.run(payload(**task), timeout_seconds=timeout_seconds, on_message=messages.append)
    return done, messages


async def test_a_worker_is_reused(pool: WorkerPool):
    (first, log_1), (second, log_2) = await play(pool), await play(pool)
    assert first.value == second.value == {"reward": 1.0, "metrics": {}, "result": None, "call_rewards": None}
    assert log_1 == log_2
    assert len(first.digest) == 64


async def test_a_plain_function_is_run_too(agent: Path):
    async with open_pool(f"{agent}:plain") as pool:
        done, _ = await play(pool)
    assert done.value == {"reward": 0.5, "metrics": {"turns": 2.0}, "result": None, "call_rewards": None}


@pytest.mark.parametrize("name", ["loops", "passes_on"])
async def test_a_plain_function_may_run_a_loop_or_return_what_is_awaited(agent: Path, name: str):
    async with open_pool(f"{agent}:{name}") as pool:
        (first, _), (second, _) = await play(pool), await play(pool)
    assert first.failure is second.failure is None
    assert first.value == second.value == {"reward": 0.5, "metrics": {}, "result": None, "call_rewards": None}


@pytest.mark.parametrize(
    ("do", "kind", "words"),
    [
        ("exit", "WorkerDied", "exited with status 3"),
        ("segfault", "WorkerDied", "was killed by SIGSEGV"),
        ("raise", "KeyError", "no such tool"),
        ("sysexit", "SystemExit", "4"),
        ("object", "TypeError", "can not be sent"),
        ("large number", "TypeError", "can not be sent"),
    ],
)
async def test_a_fault_costs_one_piece_of_work(pool: WorkerPool, do: str, kind: str, words: str):
    bystander = asyncio.create_task(play(pool, do="sleep", seconds=0.3))
    await asyncio.sleep(0.05)
    done, _ = await play(pool, do=do)
    assert done.failure is not None
    assert done.failure.kind == kind
    assert words in done.failure.message
    assert done.failure.is_crash == (kind == "WorkerDied")
    assert (await bystander)[0].value["reward"] == 1.0
    assert (await play(pool))[0].value["reward"] == 1.0


async def test_a_failure_says_at_which_line_of_the_users_code_it_happened(pool: WorkerPool):
    for do, line in (("raise", 'raise KeyError("no such tool")'), ("abort", 'policy.abort("the site is down")')):
        done, _ = await play(pool, do=do)
        assert done.failure is not None
        number = next(index for index, text in enumerate(CODE.splitlines(), 1) if line in text)
        assert done.failure.sentence.endswith(f" (agent.py:{number})")


async def test_an_endless_loop_is_killed_at_its_deadline(pool: WorkerPool):
    began = time.monotonic()
    done, log = await play(pool, 0.5, do="loop")
    assert done.failure is not None
    assert done.failure.is_late
    assert time.monotonic() - began < 5
    await _gone(log[0]["pid"])


async def test_abort_is_told_apart(pool: WorkerPool):
    done, _ = await play(pool, do="abort")
    assert done.failure is not None
    assert done.failure.is_abort
    assert done.failure.message == "the site is down"


async def test_a_cancelled_piece_kills_its_worker(pool: WorkerPool):
    messages: list[dict[str, int]] = []
    began = asyncio.Event()
    task = asyncio.create_task(
        pool.run(payload(do="loop"), timeout_seconds=60, on_message=lambda line: (messages.append(line), began.set()))
    )
    await began.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await _gone(messages[0]["pid"])
    assert pool.num_running == 0


async def test_children_of_a_crashed_agent_go_with_it(pool: WorkerPool):
    done, log = await play(pool, do="grandchild")
    assert done.failure is not None
    await _gone(log[1]["child"])


async def test_tasks_left_behind_end_with_the_episode(agent: Path):
    async with open_pool(f"{agent}:run", max_running=1) as pool:
        _, before = await play(pool, do="leave a task")
        done, after = await play(pool, do="tasks")
    assert before == after
    assert done.value["reward"] == 1.0


async def test_threads_of_an_agent_may_log_at_once(pool: WorkerPool):
    done, log = await play(pool, do="threads")
    assert done.failure is None
    assert sorted(line["text"][0] for line in log[1:]) == sorted("01234567" * 9)
    assert all(len(set(line["text"])) == 1 for line in log[1:])


async def test_what_a_thread_logs_after_its_episode_is_not_the_next_ones(agent: Path):
    async with open_pool(f"{agent}:run", max_running=1) as pool:
        _, first = await play(pool, do="late thread")
        done, second = await play(pool, do="sleep", seconds=0.5)
    assert done.failure is None
    assert first == second


async def test_a_worker_that_leaked_is_replaced(agent: Path):
    async with open_pool(f"{agent}:run", max_rss_bytes=250 << 20) as pool:
        _, before = await play(pool, do="leak")
        _, after = await play(pool)
    assert before != after


async def test_a_worker_is_replaced_after_its_share_of_work(agent: Path):
    async with open_pool(f"{agent}:run", recycle_after=2) as pool:
        pids = [(await play(pool))[1][0]["pid"] for _ in range(5)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


async def test_user_code_sees_no_settings_of_ours(agent: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGENTJET_SECRET", "00")
    async with open_pool(f"{agent}:run") as pool:
        assert (await play(pool, do="env"))[0].value["result"] == []


async def test_changed_code_plays_the_next_episodes_and_running_ones_finish_on_the_old(pool: WorkerPool, agent: Path):
    old = asyncio.create_task(play(pool, do="sleep", seconds=0.5))
    await asyncio.sleep(0.1)
    _write(agent, CODE.replace("return 1.0", "return 2.0"))
    new, _ = await play(pool)
    assert new.value["reward"] == 2.0
    finished, _ = await old
    assert finished.value["reward"] == 1.0
    assert finished.digest != new.digest


async def test_broken_new_code_leaves_the_last_good_code_at_work(pool: WorkerPool, agent: Path):
    _write(agent, "import nothing_like_this\n")
    done, _ = await play(pool)
    assert done.value["reward"] == 1.0
    assert "nothing_like_this" in pool.problem


async def test_a_killed_zygote_is_replaced(pool: WorkerPool):
    running = asyncio.create_task(play(pool, do="sleep", seconds=5))
    await asyncio.sleep(0.2)
    assert pool._nursery is not None
    assert pool._nursery._process is not None
    pool._nursery._process.kill()
    done, _ = await running
    assert done.failure is not None
    assert done.failure.is_crash
    assert (await play(pool))[0].value["reward"] == 1.0


async def test_a_zygote_that_does_not_fork_is_replaced_and_its_workers_can_still_be_killed(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentjet.workers.nursery._FORK_SECONDS", 0.3)
    messages: list[dict[str, int]] = []
    running = asyncio.create_task(pool.run(payload(do="loop"), timeout_seconds=2.0, on_message=messages.append))
    await asyncio.sleep(0.3)
    assert pool._nursery is not None
    assert pool._nursery._process is not None
    stuck = pool._nursery._process
    stuck.send_signal(signal.SIGSTOP)
    try:
        done, _ = await play(pool)
    finally:
        stuck.send_signal(signal.SIGCONT)
    assert done.failure is None
    late = await running
    assert late.failure is not None
    assert late.failure.is_late
    await _gone(messages[0]["pid"])


async def test_orders_to_a_zygote_that_is_gone_are_no_error():
    nursery = Nursery("agent.py:run", ADAPTER)
    nursery._control, other = socket.socketpair()
    other.close()
    nursery.is_alive = True
    with nursery._control:
        nursery.kill(1)
        nursery.retire()
    assert not nursery.is_usable


async def test_closing_leaves_no_process(agent: Path):
    async with open_pool(f"{agent}:run") as pool:
        _, log = await play(pool)
        busy = asyncio.create_task(play(pool, do="loop"))
        await asyncio.sleep(0.1)
    await _gone(log[0]["pid"])
    done, _ = await busy
    assert done.failure is not None
    assert not [child for child in psutil.Process(os.getpid()).children(recursive=True) if "zygote" in str(child)]


async def test_closing_with_many_workers_says_nothing(agent: Path, capfd: pytest.CaptureFixture[str]):
    for _ in range(3):
        async with open_pool(f"{agent}:run", max_running=24, num_warm=24):
            pass
    assert "wakeup fd" not in capfd.readouterr().err


async def test_many_episodes_at_once_are_cheap_to_start(agent: Path):
    async with open_pool(f"{agent}:run", max_running=32) as pool:
        results = await asyncio.gather(*(play(pool, do="sleep", seconds=0.3) for _ in range(32)))
    assert len({log[0]["pid"] for _, log in results}) == 32
    assert all(done.failure is None for done, _ in results)


async def test_a_zygote_that_is_killed_while_it_imports_is_started_again(tmp_path: Path):
    mark = tmp_path / "mark"
    suicide = f"import os, pathlib\nmark = pathlib.Path({str(mark)!r})\n"
    suicide += "if not mark.exists(): mark.touch(); os.kill(os.getpid(), 9)\n"
    (tmp_path / "agent.py").write_text(suicide + "def run(task, policy): return 1.0")
    async with open_pool(f"{tmp_path}/agent.py:run") as workers:
        assert (await play(workers))[0].failure is None


async def test_code_that_kills_its_process_at_every_import_is_one_sentence(tmp_path: Path):
    (tmp_path / "agent.py").write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(WorkflowError, match=r"ended the process \(status -9\)"):
        async with open_pool(f"{tmp_path}/agent.py:run"):
            pass


@pytest.mark.parametrize(
    ("code", "entry", "words"),
    [
        (None, "agent.py:run", "there is no file"),
        ("", "agent.py", "names no function"),
        ("def other(): ...", "agent.py:run", "defines no 'run'; it has other"),
        ("x = 1\n\nraise ValueError('bad day')", "agent.py:run", "line 3: ValueError: bad day"),
        ("def run(:\n", "agent.py:run", "line 1: SyntaxError"),
        ("import os; os._exit(9)", "agent.py:run", "ended the process"),
        ("async def run(task, policy): yield 1", "agent.py:run", "no generator"),
        ("", "no_such_module_anywhere:run", "there is no module"),
    ],
)
async def test_a6_code_that_can_not_be_loaded_is_one_sentence(tmp_path: Path, code: str | None, entry: str, words: str):
    if code is not None:
        (tmp_path / "agent.py").write_text(code)
    text = f"{tmp_path}/{entry}" if entry.startswith("agent.py") else entry
    with pytest.raises(WorkflowError, match=words) as caught:
        async with open_pool(text):
            pass
    assert "\n" not in str(caught.value)


def _write(path: Path, code: str) -> None:
    path.write_text(code)


async def _gone(pid: int) -> None:
    for _ in range(300):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"process {pid} is still there")
