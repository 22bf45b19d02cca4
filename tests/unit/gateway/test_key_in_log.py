"""Keys are in no log: neither of good requests nor of bad ones, here or in the packages beneath."""

import logging
import time

import httpx
from chat_models import RUN, user
from gateway_site import site
from small_swarm import SECRET

from agentjet.accounting.key import Key, sign
from agentjet.errors import EngineError
from agentjet.gateway.endpoint import DIALECTS
from agentjet.observe import log

BODY = {"model": "m", "messages": [user("q")], "input": "q", "prompt": "q", "max_tokens": 5}
FIELDS = {"/v1/responses": ("model", "input"), "/v1/completions": ("model", "prompt")}


async def test_no_log_line_holds_a_key(memory_bus, tmp_path):
    path = tmp_path / "log.jsonl"
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    log.configure(actor="gateway", run=RUN, level="debug", path=path)
    try:
        async with site(memory_bus) as here:
            key, old = await here.swarm.claim(group="g-1"), await here.swarm.claim()
            await here.swarm.claim()
            late = sign(SECRET, Key(RUN, "g-1.0.0", 1, 1.0))
            foreign = sign(SECRET, Key("other-bbbbbb", "g-1.0.0", 1, time.time() + 60))
            keys = [key, old, late, foreign, key[:-3] + "abc"]
            async with httpx.AsyncClient() as client:
                for one in keys:
                    await ask_all(client, here.url.removesuffix("/v1"), one)
                here.swarm.engine.reply = failing
                await ask_all(client, here.url.removesuffix("/v1"), key)
                await client.post(here.url + f"/chat/completions?key={key}", json=BODY)
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:], root.level = handlers, level
    written = path.read_text()
    assert "call refused" in written
    for one in keys:
        assert one.rpartition(".")[2][:12] not in written
        assert one[:40] not in written


def failing(prompt):
    raise EngineError("lost")


async def ask_all(client, url, key):
    for path in (path for dialect in DIALECTS for path in dialect.paths):
        names = FIELDS.get(path, ("model", "messages", "max_tokens"))
        body = {name: BODY[name] for name in names}
        await client.post(url + path, json=body, headers={"authorization": f"Bearer {key}"})
        await client.post(url + path, json=body | {"stream": True}, headers={"x-api-key": key})
        await client.post(url + path, content=b"{", headers={"authorization": f"Bearer {key}"})
