from pathlib import Path

from agentjet.config.reference import reference
from agentjet.config.settings import PoolSettings, SwarmSettings

DOCUMENT = Path(__file__).parents[3] / "docs/configuration.md"


def test_document_is_current():
    assert DOCUMENT.read_text() == reference(), "run: python -m agentjet.config.reference docs/configuration.md"


def test_every_section_and_key_is_described():
    text = reference()
    for section in SwarmSettings.model_fields:
        assert f"## `[{section}" in text
    for key in PoolSettings.model_fields:
        assert f"`{key}`" in text or f"[pools.NAME.{key}]" in text


def test_row_shows_type_bound_and_default():
    assert "| `learning_rate` | number > 0 | `1e-06` |  |" in reference()
    assert "| `path` | text | required | A preset" in reference()
    assert "| `password` | secret |  |" in reference()
