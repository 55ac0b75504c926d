"""The commands for checkpoints: ``zerofunc inspect``, ``zerofunc convert``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from zerofunc.saving import folders
from zerofunc.saving.checkpoints import SHARED
from zerofunc.saving.convert import convert as to_safetensors
from zerofunc.saving.convert import locate
from zerofunc.saving.foreign import import_checkpoint
from zerofunc.saving.manifest import NAME, CheckpointError, Manifest, read_manifest, some
from zerofunc.saving.manifest import verify as verify_files
from zerofunc.saving.packing import read_packed

Tag = Annotated[str | None, typer.Option(help="Which checkpoint of the folder; by default the latest.")]


def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder that was saved into, or one checkpoint in it.")],
    tag: Tag = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, and compare checksums.")] = False,
    config: Annotated[bool, typer.Option("--config", help="Print the run's configuration, too.")] = False,
) -> None:
    """Print what a checkpoint holds. Exit code 1 if it is missing or damaged."""
    try:
        path = locate(folder, tag)
        manifest = read_manifest(path)
        if verify:
            verify_files(path, manifest)
    except CheckpointError as error:
        _fail(error)
    console = Console(width=None if sys.stdout.isatty() else 160)
    others = sorted(one.parent.name for one in path.parent.glob(f"[!.]*/{NAME}"))
    latest = folders.latest(path.parent)
    named = ", ".join(f"{name} (latest)" if name == latest else name for name in others)
    console.print(
        f"{path}: step {manifest.global_steps}, saved {manifest.saved_at} at stage {manifest.stage} by "
        f"{manifest.num_ranks} ranks, optimizer {manifest.optimizer}; zerofunc {manifest.zerofunc}, torch "
        f"{manifest.torch}\ncheckpoints in {path.parent}: {named}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(table_of(manifest))
    for name, kept in manifest.ties.items():
        console.print(f"{name} is tied to {kept}", markup=False, highlight=False)
    if manifest.excluded:
        console.print(f"left out: {some(manifest.excluded)}", markup=False, highlight=False)
    if config:
        console.print_json(json.dumps(read_packed(path / SHARED)["config"]))
    checked = "; every byte is as it was written" if verify else ""
    nbytes = sum(file.nbytes for file in manifest.files.values())
    console.print(f"{len(manifest.files)} files, {_size(nbytes)}{checked}", highlight=False)


def table_of(manifest: Manifest) -> Table:
    """A row for each parameter and buffer: what there is of it, in bytes."""
    kinds = {"master": manifest.of("model"), "buffer": manifest.of("buffer"), "gradient": manifest.of("gradient")}
    for path, stored in manifest.of("optimizer").items():
        key, _, name = path.partition("/")
        kinds.setdefault(key, {})[name] = stored
    kinds = {kind: tensors for kind, tensors in kinds.items() if tensors}
    table = Table()
    table.add_column("name", overflow="fold")
    for column in ("dtype", "shape", *kinds):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(name for tensors in kinds.values() for name in tensors):
        first = next(tensors[name] for tensors in kinds.values() if name in tensors)
        cells = [_size(tensors[name].nbytes) if name in tensors else "" for tensors in kinds.values()]
        table.add_row(name, first.dtype, " x ".join(map(str, first.shape)), *cells)
    table.add_section()
    table.add_row("all", "", "", *(_size(sum(one.nbytes for one in tensors.values())) for tensors in kinds.values()))
    return table


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or what another library has saved.")],
    destination: Annotated[Path, typer.Argument(help="A folder to write.")],
    dtype: Annotated[str | None, typer.Option(help="Of floating-point weights, such as bfloat16.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a safetensors file.")] = "5GB",
    tag: Tag = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Run code that files of others may hold. Only if you trust them.")
    ] = False,
) -> None:
    """Turn a checkpoint into safetensors; or what DeepSpeed, torch or Hugging Face have saved into a checkpoint."""
    try:
        if _is_ours(source, tag):
            to_safetensors(source, destination, dtype, max_shard_size, tag)
        else:
            destination = import_checkpoint(source, destination, tag, allow_pickle)
    except (CheckpointError, ValueError) as error:
        _fail(error)
    print(f"wrote {destination}")


def _is_ours(source: Path, tag: str | None) -> bool:
    """Whether it is a checkpoint of zerofunc, whole or not."""
    name = tag if tag is not None else folders.latest(source)
    return (source / NAME).is_file() or (name is not None and (source / name / NAME).is_file())


def _fail(error: Exception) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False, highlight=False)
    raise typer.Exit(1) from error
