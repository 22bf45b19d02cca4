"""JSON Schemas of the records, for clients in other languages: `python -m agentjet.schemas.export docs/wire`.

Each describes the msgpack map of a message whose header `AJ-Schema` names it. Arrays of ids and log-probs are msgpack
`bin`, which the description of the field says.
"""

import json
import sys
from pathlib import Path
from typing import Any

from agentjet.schemas.codec import SCHEMA_HEADER, registry
from agentjet.schemas.record import Record


def json_schemas() -> dict[str, str]:
    """File name to text of the schema of every record."""
    return {f"{name}.json": _text(cls) for name, cls in sorted(registry().items())}


def write_schemas(folder: Path) -> None:
    """Write every schema, and remove those of records that are no more."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = json_schemas()
    for stale in set(folder.glob("*.json")) - {folder / name for name in texts}:
        stale.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text)


def _text(cls: type[Record]) -> str:
    schema: dict[str, Any] = cls.model_json_schema()
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"header {SCHEMA_HEADER}: {cls.schema_header()}",
    }
    return json.dumps(head | schema, indent=2) + "\n"


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
