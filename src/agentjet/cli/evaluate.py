"""`agentjet eval`: play the [eval] pool's tasks with a checkpoint, without a run.

Tasks, seeds, sampling and rewards are those of the evaluations of a run; the figures can be compared with its curve.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agentjet.checkpoint.export import export, holds_adapter
from agentjet.checkpoint.store import CheckpointStore
from agentjet.cli.output import write_json, write_line
from agentjet.cli.target import Folder
from agentjet.config import LoraSettings, PoolSettings, SwarmSettings
from agentjet.curriculum.dataset import load_tasks
from agentjet.durable.manifest import MANIFEST, read_manifest
from agentjet.errors import CheckpointError, ConfigError, ModelNotFoundError, UsageError
from agentjet.reward import function, judge
from agentjet.reward.panel import Panel
from agentjet.reward.scorer import decide, invalid, question, scored, unscored
from agentjet.rollout.ending import ended
from agentjet.rollout.stage import Part, Stage
from agentjet.schemas.episode import Episode
from agentjet.schemas.score import Outcome, Score
from agentjet.workers.pool import WorkerPool


async def evaluate(
    checkpoint: str,
    *,
    model: str = "",
    tasks: int = 0,
    repeats: int = 0,
    target: Folder | None = None,
    json: bool = False,
) -> int:
    """Evaluate a checkpoint or model on the [eval] pool. Exit code 1 when no episode could be scored.

    Args:
        checkpoint: A checkpoint's folder, `model/version` or `model` for its newest; or a preset, or a model's folder.
        model: Which model of the configuration it stands for (default: the only trained one of the pool).
        tasks: How many tasks (default: eval.num_tasks).
        repeats: Episodes for each task (default: eval.num_repeats).
        json: One JSON object.
    """
    settings = (target or Folder()).settings()
    if not settings.eval.pool:
        raise ConfigError(
            "no [eval] pool is configured; set eval.pool in swarm.toml, or name the run with --config or --dir"
        )
    stands_for = _model_of(settings, model)
    with tempfile.TemporaryDirectory(prefix="agentjet-eval-") as scratch:
        source = _checkpoint_of(settings, checkpoint)
        path = str(_model_from(source, Path(scratch) / "model")) if source else checkpoint
        of = settings.models[stands_for].model_copy(update={"path": path, "lora": LoraSettings()})
        settings = settings.model_copy(update={"models": {**settings.models, stands_for: of}})
        scores = await _play(settings, tasks or settings.eval.num_tasks, repeats or settings.eval.num_repeats)
    report = summary(scores)
    about = {"checkpoint": str(source or checkpoint), "model": stands_for}
    if source:
        about["version"] = read_manifest(source).version
    if json:
        write_json({**about, **report})
    else:
        for line in lines({**about, **report}):
            write_line(line)
    return 0 if report["num_scored"] else 1


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Figures over the episodes that were scored; the others are counted and are in no mean."""
    good = [score for score in scores if score.outcome is Outcome.SCORED]
    rewards = [score.reward for score in good if score.reward is not None]
    names = sorted({name for score in good for name in score.metrics})
    faults = sorted({f"{score.fault.kind}: {score.fault.message}" for score in scores if score.fault is not None})
    return {
        "num_episodes": len(scores),
        "num_scored": len(good),
        "reward_mean": fmean(rewards) if rewards else None,
        **{f"{name}_mean": fmean(s.metrics[name] for s in good if name in s.metrics) for name in names},
        "faults": faults,
    }


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report for people: what there is, in digits that mean something."""
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in report.items()}
    shown["reward_mean"] = "none: no episode was scored" if report["reward_mean"] is None else shown["reward_mean"]
    faults = [f"! {fault}" for fault in shown.pop("faults")]
    return [f"{name:<20} {value}" for name, value in shown.items()] + faults


def _model_of(settings: SwarmSettings, model: str) -> str:
    names = settings.trained_models(settings.eval.pool)
    if model in settings.models:
        return model
    if model or len(names) != 1:
        raise UsageError(f"say with --model which model it stands for: {', '.join(settings.models)}")
    return names[0]


def _model_from(checkpoint: Path, folder: Path) -> Path:
    """Writes the model of a checkpoint to a new folder; an adapter is merged into its own."""
    if not holds_adapter(checkpoint):
        return export(checkpoint, folder)
    from agentjet.training.adapter_merge import base_of, merge

    return merge(checkpoint, folder, base_of(checkpoint))


def _checkpoint_of(settings: SwarmSettings, checkpoint: str) -> Path | None:
    """A checkpoint's folder, whose model has to be exported as what else lies in it is the learner's; None: a model."""
    from agentjet.pretrained.model_file import PRESETS, is_model_folder

    given = Path(checkpoint).expanduser()
    if checkpoint in PRESETS or (is_model_folder(given) and not (given / MANIFEST).is_file()):
        return None
    try:
        return CheckpointStore(settings.run.dir / "checkpoints").find(checkpoint)
    except CheckpointError as error:
        raise ModelNotFoundError(
            f"{checkpoint!r} is neither a checkpoint ({error}), nor a preset ({', '.join(PRESETS)}), nor a folder with "
            "config.json and *.safetensors; of a model of the hub name the folder it was downloaded to"
        ) from None


async def _play(settings: SwarmSettings, num_tasks: int, num_repeats: int) -> list[Score]:
    # Imported here: it brings torch, which `--help` must not load.
    from agentjet.cli.local import serve

    pool = settings.pools[settings.eval.pool]
    tasks = load_tasks(pool.tasks)[:num_tasks]
    names = settings.trained_models(settings.eval.pool)
    stage = Stage(pool.workflow, max_running=pool.max_running)
    await stage.start()
    try:
        async with serve({name: settings.models[name] for name in names}) as local:
            free = asyncio.Semaphore(pool.max_running)  # a key's time runs from its claim

            async def play(place: int, task: dict[str, Any]) -> Episode:
                seed, sampling, seconds = settings.eval.seed + place, settings.eval.sampling, pool.deadline_seconds
                async with free:
                    given = await local.claim(task, seed=seed, sampling=sampling, deadline_seconds=seconds)
                    part = Part(
                        local.base_url, given.key, names, seed, given.ticket.id, is_eval=True, sampling=sampling
                    )
                    played = await stage.play(task, part, timeout_seconds=seconds)
                captured = local.gateway.session(given.key)
                return ended(given.ticket, given.attempt, captured, played, worker="command line")

            plays = (play(place, task) for place, task in enumerate(tasks) for _ in range(num_repeats))
            episodes = await asyncio.gather(*plays)
    finally:
        await stage.close()
    return await score_all(episodes, pool)


async def score_all(episodes: Sequence[Episode], pool: PoolSettings) -> list[Score]:
    """Scores by the agent's own returns, else by the pool's reward function or group judge in a worker process."""
    if pool.group_judge:
        return await _judge_all(episodes, pool)
    decided = [(episode, decide(episode, pool.reward)) for episode in episodes]
    if all(score is not None for _, score in decided):
        return [score for _, score in decided if score is not None]
    worker = WorkerPool(pool.reward, adapter=function.ADAPTER, max_running=1)
    await worker.start()
    try:
        return [score or await _ask(worker, episode, pool) for episode, score in decided]
    finally:
        await worker.close()


async def _ask(worker: WorkerPool, episode: Episode, pool: PoolSettings) -> Score:
    done = await worker.run(question(episode), timeout_seconds=pool.reward_timeout_seconds)
    if done.failure is not None:
        return invalid(episode, done.failure.kind, done.failure.message, judged_by=pool.reward)
    return scored(episode, done.value, judged_by=pool.reward)


async def _judge_all(episodes: Sequence[Episode], pool: PoolSettings) -> list[Score]:
    """Scores in any order; a group is what was played with one seed, the repeats of a task."""
    failures = [score for score in map(unscored, episodes) if score is not None]
    groups: dict[int, list[Episode]] = {}
    for episode in (one for one in episodes if unscored(one) is None):
        members = groups.setdefault(episode.ticket.seed, [])
        ticket = episode.ticket.model_copy(update={"member": len(members)})
        members.append(episode.model_copy(update={"ticket": ticket}))
    worker = WorkerPool(pool.group_judge, adapter=judge.ADAPTER, max_running=1)
    await worker.start()
    try:
        judged = [score for members in groups.values() for score in await _judge(worker, Panel(members), pool)]
    finally:
        await worker.close()
    return failures + judged


async def _judge(worker: WorkerPool, panel: Panel, pool: PoolSettings) -> list[Score]:
    done = await worker.run(panel.question(), timeout_seconds=pool.reward_timeout_seconds)
    if done.failure is None:
        return panel.scores(panel.judged(pool.group_judge, done.value))
    return panel.scores(panel.unjudged(pool.group_judge, f"{done.failure.kind}: {done.failure.sentence}"))
