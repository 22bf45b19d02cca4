"""The demo's configurations: model, game and settings that were tried together.

A recipe becomes a plain `swarm.toml` in the demo's folder: what the demo did can be read, changed and run again.
"""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import agentjet
from agentjet.errors import UsageError
from agentjet.inference.vllm_options import check_installed


@dataclass(frozen=True, slots=True)
class Recipe:
    """One demo."""

    title: str
    model: str
    """Preset of every model."""
    models: tuple[str, ...]
    """Names in the configuration."""
    game: str
    """Folder under `examples/`."""
    num_steps: int
    learning_rate: float
    max_tokens: int
    """Most tokens of a reply."""
    learner: str = ""
    """Further lines of the learner's table."""
    engine: str = ""
    algorithm: str = ""
    eval_every: int = 10
    eval_tasks: int = 7
    checkpoint_every: int = 20
    references: dict[str, float] = field(default_factory=dict)
    """Lines on the curve: label to mean reward."""


GUESS_REFERENCES = {"random valid player": 0.2 + 0.8 * 0.37, "perfect player": 1.0}

RECIPES: dict[tuple[str, int], Recipe] = {
    ("smollm2-135m", 1): Recipe(
        title="SmolLM2-135M learns to guess a number",
        model="smollm2-135m",
        models=("policy",),
        game="guess",
        num_steps=60,
        learning_rate=1e-5,
        max_tokens=8,
        references=GUESS_REFERENCES,
    ),
    ("tiny", 1): Recipe(
        title="A tiny random model learns to guess a number",
        model="tiny",
        models=("policy",),
        game="guess",
        num_steps=20,
        learning_rate=2e-2,
        max_tokens=1,
        references=GUESS_REFERENCES,
    ),
    ("tiny", 2): Recipe(
        title="Two tiny models invent a signal",
        model="tiny",
        models=("sender", "receiver"),
        game="signal",
        num_steps=25,
        learning_rate=2e-2,
        max_tokens=1,
    ),
}


def recipe_for(model: str, num_models: int, engine: str = "transformers") -> Recipe:
    """The recipe, played with a kind of engine.

    Raises UsageError, which lists what there is; MissingExtraError where vLLM is asked for and not installed.
    """
    found = RECIPES.get((model, num_models))
    if found is None:
        known = ", ".join(f"--model {name} --models {count}" for name, count in RECIPES)
        raise UsageError(f"there is no demo with --model {model} --models {num_models}; there are: {known}")
    if engine == "vllm":
        check_installed()
        return replace(found, engine=f'kind = "vllm"\n{found.engine}'.rstrip())
    return found


def examples_folder() -> Path:
    """Where the games are: beside the source in a clone, inside the package when installed."""
    package = Path(agentjet.__file__).parent
    clone = package.parents[1] / "examples"
    return clone if clone.is_dir() else package / "examples"


def write_config(recipe: Recipe, folder: Path, *, num_steps: int, seed: int, model_path: str) -> Path:
    """Write `swarm.toml` into the folder; returns its path."""
    agent = examples_folder() / recipe.game / "agent.py"
    lines = [
        f"# {recipe.title}. Written by `agentjet demo`; `agentjet up --config` this file goes on with the run.",
        "[run]",
        f'name = "{recipe.game}"',
        'dir = "."',
        f"seed = {seed}",
        f"num_steps = {num_steps}",
        "",
    ]
    for name in recipe.models:
        lines += [
            f"[models.{name}]",
            f"path = {_quoted(model_path)}",
            "",
            f"[models.{name}.engine]",
            *_lines(recipe.engine),
            f"[models.{name}.learner]",
            f"learning_rate = {recipe.learning_rate!r}",
            *_lines(recipe.learner),
            f"[models.{name}.algorithm]",
            *_lines(recipe.algorithm),
        ]
    lines += [
        f"[pools.{recipe.game}]",
        f"workflow = {_quoted(f'{agent}:run')}",
        f"tasks = {_quoted(f'{agent}:tasks')}",
        "deadline_seconds = 120.0",
        f"sampling = {{ temperature = 1.0, max_tokens = {recipe.max_tokens} }}",
        "",
        "[eval]",
        f'pool = "{recipe.game}"',
        f"every_steps = {recipe.eval_every}",
        f"num_tasks = {recipe.eval_tasks}",
        f"sampling = {{ temperature = 0.0, max_tokens = {recipe.max_tokens} }}",
        "",
        "[checkpoint]",
        f"every_steps = {recipe.checkpoint_every}",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "swarm.toml"
    path.write_text("\n".join(lines), "utf-8")
    return path


def set_num_steps(config: Path, num_steps: int) -> None:
    """Change `run.num_steps` in a configuration and nothing else.

    Raises UsageError when the file has no such line.
    """
    text, count = re.subn(r"(?m)^num_steps *= *\d+", f"num_steps = {num_steps}", config.read_text("utf-8"), count=1)
    if not count:
        raise UsageError(f"{config} has no line `num_steps = ...` in [run]; add it")
    config.write_text(text, "utf-8")


def _quoted(text: str) -> str:
    """A TOML basic string: as JSON's, whose one addition is that it takes DEL unescaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lines(text: str) -> list[str]:
    return [*text.splitlines(), ""]
