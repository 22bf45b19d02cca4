"""`agentjet checkpoint ls|verify|export`: on the folders, without a server."""

from pathlib import Path

from agentjet.checkpoint.export import export as export_model
from agentjet.checkpoint.export import holds_adapter
from agentjet.checkpoint.store import CheckpointStore
from agentjet.cli.output import readable_bytes, write_json, write_line
from agentjet.cli.target import Folder, no_run_in
from agentjet.durable.manifest import read_manifest
from agentjet.durable.manifest import verify as verify_checkpoint
from agentjet.errors import CheckpointError, UsageError


def ls(*, target: Folder | None = None, json: bool = False) -> None:
    """List the checkpoints of a run, oldest first.

    Args:
        json: One JSON list.
    """
    store = _store(target)
    rows = []
    for model in store.models():
        for entry in store.entries(model):
            try:
                manifest = read_manifest(entry.path)
                about = {"step": manifest.step, "num_bytes": manifest.num_bytes, "error": None}
            except CheckpointError as error:
                about = {"step": entry.version.step, "num_bytes": 0, "error": str(error)}
            rows.append({"model": model, "version": str(entry.version), "path": str(entry.path), **about})
    if json:
        write_json(rows)
        return
    for row in rows:
        state = row["error"] or f"{readable_bytes(int(row['num_bytes'])):>10}"
        write_line(f"{row['model']}/{row['version']:<10} step {row['step']:<6} {state}  {row['path']}")
    if not rows:
        is_run = store.root.parent.joinpath("run.json").is_file()
        write_line(f"no checkpoints yet in {store.root}" if is_run else no_run_in(store.root.parent))


def verify(*names: str, target: Folder | None = None) -> int:
    """Read every byte and compare digests. Exit code 1 when one is damaged.

    Args:
        names: Folders, `model/version`, or `model` for its newest; without any, all checkpoints of the run.
    """
    store = _store(target)
    paths = [store.find(name) for name in names]
    if not names:
        paths = [entry.path for model in store.models() for entry in store.entries(model)]
    if not paths:
        raise CheckpointError(f"there is no checkpoint in {store.root}; say with --config or --dir which run is meant")
    num_damaged = 0
    for path in paths:
        try:
            manifest = verify_checkpoint(path)
            write_line(f"ok      {path}  {len(manifest.files)} files, {readable_bytes(manifest.num_bytes)}")
        except CheckpointError as error:
            num_damaged += 1
            write_line(f"damaged {error}")
    return 1 if num_damaged else 0


def export(
    name: str,
    folder: Path,
    *,
    adapter: bool = False,
    base: Path | None = None,
    target: Folder | None = None,
    json: bool = False,
) -> None:
    """Write the model of a checkpoint in the Hugging Face format: safetensors, configuration, tokenizer.

    A LoRA adapter is merged into its model; how far that moves log-probs is measured on a short text.

    Args:
        name: A checkpoint's folder, `model/version`, or `model` for its newest.
        folder: Where to; a new folder.
        adapter: Write a LoRA adapter by itself, as peft and vLLM load it.
        base: Folder of the model that a LoRA adapter is of (default: where it was trained).
        json: One JSON object.
    """
    checkpoint = _store(target).find(name)
    has_adapter = holds_adapter(checkpoint)
    if not has_adapter and (adapter or base):
        raise UsageError(
            f"{checkpoint} holds all weights and no adapter; leave {'--adapter' if adapter else '--base'} out"
        )
    errors: dict[str, dict[str, float]] = {}
    if has_adapter and not adapter:
        from agentjet.training.adapter_merge import as_json, base_of, merge, merging_error

        base = base or base_of(checkpoint)
        merge(checkpoint, folder, base)
        errors = as_json(merging_error(checkpoint, base, folder))
    else:
        export_model(checkpoint, folder)
    if json:
        write_json({"path": str(folder), "merging_error": errors})
        return
    write_line(str(folder))
    for dtype, error in errors.items():
        write_line(
            f"merged against unmerged in {dtype}: log-probs of {error['num_tokens']} tokens differ by "
            f"{error['mean']:.1e} nats on average, {error['max']:.1e} at most"
        )


def _store(target: Folder | None) -> CheckpointStore:
    return CheckpointStore((target or Folder()).settings().run.dir / "checkpoints")
