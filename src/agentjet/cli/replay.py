"""`agentjet replay`: derive a run's steps again from its log, and compare them bit for bit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from agentjet.checkpoint.store import CheckpointStore
from agentjet.cli.output import write_json, write_line
from agentjet.cli.target import Target, find_run, open_bus
from agentjet.config import SwarmSettings
from agentjet.config.place import RunPlace
from agentjet.errors import ConfigError, UsageError, UserError

if TYPE_CHECKING:
    from agentjet.training.replay import ReplayedStep


async def replay(
    *,
    base: Annotated[str, Parameter(name="--from")] = "initial",
    model: str = "",
    verify: bool = False,
    target: Target | None = None,
    json: bool = False,
) -> int:
    """Derive the steps after a checkpoint again from the log. With --verify, exit code 1 when a step differs.

    Args:
        base: A checkpoint's folder or version (for example 1-20), or `initial` for the first weights.
        model: Which model (default: the only trained one).
        verify: Compare each step's batch and weights with LEDGER; needs `run.is_deterministic`.
        json: One JSON object at the end instead of a line for each step.
    """
    from agentjet.training.replay import Replay

    settings = (target or Target()).settings()
    if verify and not settings.run.is_deterministic:
        raise ConfigError("run.is_deterministic is off: the same log need not give the same bits; set it for the run")
    name = _model_of(settings, model)
    steps: list[ReplayedStep] = []
    async with open_bus(settings) as bus:
        run = await find_run(bus, settings)
        async for step in Replay(bus, run, name, settings, _folder(settings, name, base)).steps():
            steps.append(step)
            if not json:
                write_line(_line(step, verify))
    if verify and not steps:
        raise UserError(f"no step follows {base}: nothing was compared; take an older checkpoint with --from")
    is_identical = all(step.is_identical for step in steps)
    if json:
        write_json({"run": run, "model": name, "from": base, "steps": len(steps), "is_identical": is_identical})
    else:
        write_line(
            f"{len(steps)} steps replayed" + (f", identical: {'yes' if is_identical else 'NO'}" if verify else "")
        )
    return 1 if verify and not is_identical else 0


def _line(step: "ReplayedStep", verify: bool) -> str:
    verdict = "identical" if step.is_identical else "another batch" if not step.is_same_batch else "other weights"
    return f"step {step.step} ({step.version})  {step.digest[:16]}" + (f"  {verdict}" if verify else "")


def _model_of(settings: SwarmSettings, model: str) -> str:
    trained = [name for name, of in settings.models.items() if of.is_trained]
    if not model and len(trained) == 1:
        return trained[0]
    if model not in trained:
        raise UsageError(f"say which model with --model: {', '.join(trained) or 'none is trained here'}")
    return model


def _folder(settings: SwarmSettings, model: str, base: str) -> Path | None:
    if base == "initial":
        return None
    if Path(base).is_dir():
        return Path(base)
    folder = RunPlace(settings.run.dir).checkpoints(model) / base
    if not folder.is_dir():
        known = [str(entry.version) for entry in CheckpointStore(folder.parents[1]).entries(model)]
        raise UsageError(f"there is no checkpoint {base} of model {model}; there are {', '.join(known) or 'none'}")
    return folder
