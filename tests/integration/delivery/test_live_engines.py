"""Inference actors in processes of their own, as on several hosts, and new weights on every way to them."""

import pytest
from sent_weights import SentWeights, held, kill
from served_engine import build_small, needs_vllm

from agentjet.broadcast import courier

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return build_small(tmp_path_factory.mktemp("models") / "small")


async def test_a11_an_actor_killed_while_it_applies_a_patch_comes_back_and_serves_the_newest_version(
    nats_bus, nats_server, tmp_path, small
):
    async with SentWeights(nats_bus, nats_server.url, tmp_path, small, "bus") as learner:
        first = await learner.publish()
        async with learner.engine("far", "decoding") as dying:
            await learner.until_served("far")
            assert (await learner.publish()).patch_bytes
            await held(dying)
            assert len(learner.arrived("far")) == 2, "what it had, and what it works on"
            await kill(dying)
        assert first.sha256 in learner.arrived("far")
        newest = await learner.publish()
        async with learner.engine("far"), learner.engine("far"):
            await learner.until_served("far")
            assert learner.arrived("far") == {newest.sha256}


async def test_a_broadcast_reaches_every_host_and_what_it_misses_comes_by_the_bus(
    nats_bus, nats_server, tmp_path, small, monkeypatch
):
    async with SentWeights(nats_bus, nats_server.url, tmp_path, small, "nccl") as learner:
        assert (await learner.publish()).broadcast == "", "nobody is there"
        async with learner.engine("far") as one, learner.engine("farther", "naming") as other:
            await learner.until_served("far", "farther")
            await learner.publish()
            await held(other)
            await learner.until_served("far")
            await kill(other)
            async with learner.engine("farther") as other:
                await learner.until_served("far", "farther")
                assert learner.publisher._newest.is_on_bus, "for the one that came late"
                for _ in range(2):
                    record = await learner.publish()
                    assert record.broadcast.startswith("127.0.0.1:")
                    await learner.until_served("far", "farther")
                    assert learner.arrived("far") == learner.arrived("farther") == {record.sha256}
                assert not learner.publisher._newest.is_on_bus
                # One that is dead, and was seen a moment ago, is not waited for once the window has closed.
                monkeypatch.setattr(courier, "WINDOW_SECONDS", 4.0)
                await kill(other)
                record = await learner.publish()
                await learner.until_served("far")
                assert learner.arrived("far") == {record.sha256}
            async with learner.engine("farther"):
                await learner.until_served("far", "farther")
            assert one.returncode is None


@needs_vllm
async def test_vllm_serves_what_a_broadcast_brought(nats_bus, nats_server, tmp_path, small):
    async with SentWeights(nats_bus, nats_server.url, tmp_path, small, "nccl") as learner:
        await learner.publish()
        async with learner.engine("far", kind="vllm"):
            await learner.until_served("far", seconds=120.0)
            record = await learner.publish()
            assert record.broadcast
            await learner.until_served("far")
            assert learner.arrived("far") == {record.sha256}
