from pathlib import Path

from agentjet.schemas.codec import registry
from agentjet.schemas.export import json_schemas, write_schemas

WIRE = Path(__file__).parents[3] / "docs/wire"


def test_exported_schemas_are_current():
    present = {path.name: path.read_text() for path in WIRE.glob("*.json")}
    assert present == json_schemas(), "run: python -m agentjet.schemas.export docs/wire"


def test_every_record_has_a_schema():
    assert set(json_schemas()) == {f"{name}.json" for name in registry()}


def test_schema_of_a_record_that_is_gone_is_removed(tmp_path):
    (tmp_path / "gone.json").write_text("{}")
    write_schemas(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(json_schemas())
