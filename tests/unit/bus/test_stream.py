"""What a stream's configuration becomes."""

from agentjet.bus.protocol import StreamSpec
from agentjet.bus.stream import config_of, widened


def test_a_stream_only_ever_grows():
    large = StreamSpec("S", ("a.>", "b.>"), 1000, allow_message_ttl=True, replicas=3)
    small = StreamSpec("S", ("a.>", "c.>"), 10)
    grown = widened(config_of(large), small)
    assert grown == config_of(large) | {"subjects": ["a.>", "b.>", "c.>"]}
    assert widened(config_of(small), large) == config_of(small) | {
        "subjects": ["a.>", "b.>", "c.>"],
        "max_bytes": 1000,
        "allow_msg_ttl": True,
        "num_replicas": 3,
        "allow_direct": False,
    }
