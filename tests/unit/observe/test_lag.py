import asyncio
import time

from agentjet.observe.lag import LoopWatch


def a_function_that_blocks() -> None:
    time.sleep(0.5)


async def test_a8_the_watchdog_names_the_function_that_blocks_the_loop():
    async with LoopWatch(stall_seconds=0.15, interval_seconds=0.02) as watch:
        await asyncio.sleep(0.05)
        a_function_that_blocks()
        await asyncio.sleep(0.1)
    assert watch.num_stalls == 1
    assert watch.last_stall is not None and "a_function_that_blocks" in watch.last_stall
    assert watch.max_lag_seconds > 0.3


async def test_a_loop_that_moves_has_little_lag_and_no_stall():
    async with LoopWatch(stall_seconds=1.0, interval_seconds=0.02) as watch:
        await asyncio.sleep(0.1)
    assert watch.num_stalls == 0
    assert watch.lag_seconds < 0.5


async def test_a_call_in_a_thread_does_not_count_as_a_stall():
    async with LoopWatch(stall_seconds=0.3, interval_seconds=0.02) as watch:
        await asyncio.to_thread(a_function_that_blocks)
    assert watch.num_stalls == 0
