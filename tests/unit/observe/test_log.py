import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from agentjet.observe.log import configure, shorten


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging as it was, so that other tests keep pytest's capture."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_actor_run_level_and_time():
    stream = io.StringIO()
    configure(actor="merger", run="r1", stream=stream)
    structlog.get_logger("x").info("stored", num_calls=3)
    (line,) = lines(stream)
    assert line["event"] == "stored" and line["num_calls"] == 3
    assert (line["actor"], line["run"], line["level"], line["logger"]) == ("merger", "r1", "info", "x")
    assert str(line["timestamp"]).endswith("Z")


def test_logs_of_other_packages_take_the_same_road():
    stream = io.StringIO()
    configure(actor="merger", stream=stream)
    logging.getLogger("nats").warning("slow %s", "consumer")
    (line,) = lines(stream)
    assert line["event"] == "slow consumer" and line["actor"] == "merger"


def test_lines_below_the_level_are_dropped():
    stream = io.StringIO()
    configure(actor="a", level="warning", stream=stream)
    structlog.get_logger("x").info("no")
    structlog.get_logger("x").warning("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


def test_keys_and_secrets_are_shortened_wherever_they_stand():
    stream = io.StringIO()
    configure(actor="a", stream=stream)
    secret = "aj-abcdef0123456789SECRETSECRET"
    try:
        raise ValueError(f"key {secret} is of another run")
    except ValueError:
        structlog.get_logger("x").exception(
            f"refused {secret}", deep=[{"headers": {"note": secret}}], password="hunter2"
        )
    text = stream.getvalue()
    assert "SECRETSECRET" not in text
    assert "hunter2" not in text
    assert "aj-abc..." in text
    assert "another run" in text


def test_a_short_secret_shows_nothing():
    assert shorten("hunter2") == "..."
    assert shorten("aj-0123456789abcdef") == "aj-012..."


def test_a_file_gets_json_and_unusual_values_are_written_as_text(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    configure(actor="a", path=path)
    structlog.get_logger("x").info("odd", where=Path("/x"), numbers={1: 2})
    line = json.loads(path.read_text())
    assert line["where"] == "/x" and line["numbers"] == {"1": 2}


def test_a_terminal_gets_readable_lines():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    configure(actor="a", stream=stream)
    structlog.get_logger("x").info("hello", password="hunter2hunter2")
    assert "hello" in stream.getvalue() and not stream.getvalue().startswith("{")
    assert "hunter2hunter2" not in stream.getvalue()
