"""`agentjet decode`: a record of the bus as JSON, from the server or from a file.

Files hold either the raw body of a message (then `--schema` says what it is) or the JSON that
`nats stream get STREAM SEQ --json` prints, headers included.
"""

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentjet.bus.record import BLOB_HEADER, read
from agentjet.cli.output import write_json
from agentjet.cli.target import Target, find_run, open_bus
from agentjet.errors import RecordError, UsageError, UserError
from agentjet.schemas.codec import SCHEMA_HEADER, registry
from agentjet.schemas.codec import decode as decode_record
from agentjet.schemas.readable import as_json
from agentjet.schemas.record import Record
from agentjet.schemas.subject import Stream, stream_name


async def decode(
    file: Path | None = None,
    *,
    schema: str = "",
    stream: str = "",
    seq: int = 0,
    text: bool = False,
    model: str = "",
    target: Target | None = None,
) -> None:
    """Print a record of the bus as JSON; token ids are lists.

    Args:
        file: A message's body, or what `nats stream get --json` printed; `-` or nothing reads standard input.
        schema: Name of the record in a raw body, for example `call`.
        stream: Read from this stream instead, for example CALLS.
        seq: Sequence of the message in the stream.
        text: Also decode token ids, with the tokenizer of `--model`.
        model: A preset, folder or Hugging Face id.
    """
    if text and not model:
        raise UsageError("--text needs --model, whose tokenizer decodes the ids")
    if stream or seq:
        record = await _of_stream(target or Target(), stream, seq)
    else:
        record = record_of_file(_read(file), schema)
    shown = as_json(record)
    write_json(with_text(shown, model) if text else shown)


async def _of_stream(target: Target, stream: str, seq: int) -> Record:
    if not stream or seq < 1:
        raise UsageError("--stream and --seq go together, for example --stream CALLS --seq 5")
    kind = stream.rpartition("_")[2].upper()
    if kind not in Stream.__members__:
        raise UsageError(f"there is no stream {stream!r}; there are {', '.join(Stream.__members__)}")
    settings = target.settings()
    async with open_bus(settings) as bus:
        run = await find_run(bus, settings)
        message = await bus.get(stream_name(run, Stream[kind]), seq)
        if message is None:
            info = await bus.stream_info(stream_name(run, Stream[kind]))
            raise UserError(f"{kind} holds no message {seq}; it holds {info.first_sequence} to {info.last_sequence}")
        if SCHEMA_HEADER not in message.headers:
            raise RecordError(f"message {seq} on {message.subject} is no record, but a piece of a blob")
        return await read(bus, run, Stream[kind], message)


def record_of_file(data: bytes, schema: str = "") -> Record:
    """The record in a raw body or in a message as the `nats` CLI prints it.

    Raises UsageError when a raw body's schema is not said, RecordError when it is none.
    """
    stored = _stored_message(data)
    if stored is not None:
        headers, body = stored
        if BLOB_HEADER in headers:
            raise UsageError("this record rides as a blob; read it with --stream and --seq")
        return decode_record(headers, body)
    known = registry()
    if schema not in known:
        raise UsageError(f"say with --schema what the record is: one of {', '.join(sorted(known))}")
    return decode_record({SCHEMA_HEADER: known[schema].schema_header()}, data)


def with_text(shown: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The JSON of a record with, beside each list of token ids, its text."""
    from tokenizers import Tokenizer

    from agentjet.pretrained.model_file import resolve

    tokenizer = Tokenizer.from_file(str(resolve(model) / "tokenizer.json"))

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        result: dict[str, Any] = {}
        for name, item in value.items():
            result[name] = walk(item)
            if (name == "ids" or name.endswith("_ids")) and isinstance(item, list):
                result[f"{name}_text"] = tokenizer.decode(item, skip_special_tokens=False)
        return result

    return walk(shown)


def _read(file: Path | None) -> bytes:
    if file is None or str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} can not be read: {error.strerror}") from None


def _stored_message(data: bytes) -> tuple[dict[str, str], bytes] | None:
    """Headers and body of a message as the `nats` CLI prints it; None when it is not one."""
    try:
        fields = json.loads(data)
        body = base64.b64decode(fields.get("data") or "")
        lines = base64.b64decode(fields["hdrs"]).decode().split("\r\n")[1:]
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip(): value.strip() for name, _, value in pairs}, body
