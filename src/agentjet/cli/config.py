"""`agentjet config show|check`."""

from pathlib import Path

from agentjet.cli.output import write_json, write_line
from agentjet.cli.target import Target
from agentjet.config import SwarmSettings
from agentjet.config.load import shown_values
from agentjet.errors import ConfigError, UserError


def show(*, target: Target | None = None, json: bool = False, changed: bool = False) -> None:
    """Every setting, and where its value comes from. Secrets are masked.

    Args:
        json: One JSON object: dotted key to value and origin.
        changed: Only what is not a default.
    """
    config = (target or Target()).load()
    values = shown_values(config.settings)
    rows = {key: (value, config.origins[key]) for key, value in values.items()}
    if changed:
        rows = {key: row for key, row in rows.items() if row[1] != "default"}
    if json:
        write_json({key: {"value": value, "origin": origin} for key, (value, origin) in rows.items()})
        return
    width = max((len(f"{key} = {value!r}") for key, (value, _) in rows.items()), default=0)
    for key, (value, origin) in rows.items():
        write_line(f"{f'{key} = {value!r}':<{min(width, 70)}}  # {origin}")


def check(*, target: Target | None = None, files: bool = False) -> None:
    """Whether the configuration is valid.

    Args:
        files: Also whether the models, workflows, task files, engines and parsers are on this machine.
    """
    config = (target or Target()).load()
    settings = config.settings
    if config.path is None:
        raise ConfigError("there is no swarm.toml here; name one with --config")
    if files:
        check_files(settings)
    pools = f"{len(settings.pools)} pool{'s' * (len(settings.pools) != 1)}"
    write_line(f"{config.path.name} is valid: {len(settings.models)} model{'s' * (len(settings.models) != 1)}, {pools}")


def check_files(settings: SwarmSettings) -> None:
    """Raises ModelNotFoundError or ConfigError for the first file, engine or parser that is not on this machine."""
    from agentjet.inference.vllm_format import check_names
    from agentjet.inference.vllm_options import check_options, option_names
    from agentjet.pretrained.model_file import resolve

    for name, model in settings.models.items():
        resolve(model.path)
        try:
            check_names(tool_parser=model.tool_parser, reasoning_parser=model.reasoning_parser)
            if model.engine.kind == "vllm":
                check_options(model.engine.vllm, option_names())
        except UserError as error:
            raise ConfigError(f"models.{name}.{error}") from error
    for pool, section in settings.pools.items():
        for field in ("workflow", "tasks", "reward", "group_judge"):
            text: str = getattr(section, field)
            file = text.rpartition(":")[0] if ".py:" in text else text
            if file.endswith((".py", ".jsonl")) and not Path(file).is_file():
                raise ConfigError(f"pools.{pool}.{field}: there is no file {file}")
