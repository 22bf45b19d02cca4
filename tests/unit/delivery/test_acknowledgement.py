"""What live engines say that they serve."""

import pytest

from agentjet.delivery.acknowledgement import oldest_acknowledged
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.presence import Presence


def engine(version: object, models: tuple[str, ...] = ("m",)) -> Presence:
    shared = {"run": RunId("r-abcdef"), "actor": "inference", "name": "e", "host": "h", "pid": 1, "started": 0.0}
    return Presence(**shared, models=models, state="busy", info={} if version is None else {"version": version})


@pytest.mark.parametrize(
    ("engines", "oldest"),
    [
        ([], None),
        ([engine("1-1", ("other",))], None),
        ([engine("1-10"), engine("1-9"), engine("2-0")], Version(1, 9)),
        ([engine("1-10"), engine(None)], Version(0, 0)),
        ([engine("strange")], Version(0, 0)),
    ],
)
def test_the_oldest_version_of_a_models_live_engines(engines: list[Presence], oldest: Version | None):
    assert oldest_acknowledged(engines, "m") == oldest
