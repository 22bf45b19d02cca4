"""The base of every record and the registry that the codec reads.

A record's class names its schema and version. Majors that differ are refused; a newer minor may add fields, which older
readers ignore. Wrong types are refused: nothing is coerced.
"""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

REGISTRY: dict[str, type["Record"]] = {}
"""Schema name to record class; filled as the classes are defined."""


class Part(BaseModel):
    """A piece of a record."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", use_attribute_docstrings=True)


class Record(Part):
    """A message with a schema name and a version `(major, minor)`."""

    schema_name: ClassVar[str]
    schema_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "schema_name" in cls.__dict__:
            REGISTRY[cls.schema_name] = cls

    @classmethod
    def schema_header(cls) -> str:
        """`<name>/<major>.<minor>` as it stands in the header `AJ-Schema`."""
        major, minor = cls.schema_version
        return f"{cls.schema_name}/{major}.{minor}"
