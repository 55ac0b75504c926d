"""The command line: ``zerofunc verify``, ``config``, ``inspect``, ``convert``."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from zerofunc.config import ConfigError, judge
from zerofunc.config.report import table as config_table
from zerofunc.config.schema import json_schema
from zerofunc.tools.checkpoints import convert, inspect
from zerofunc.verify.run import CANNOT, CELLS, ERROR, OK, Outcome, Setting, merge, verify_rank
from zerofunc.version import __version__
from zerofunc_testing.pool import RankError, RankPool

app = typer.Typer(no_args_is_help=True, add_completion=False, help="ZeRO training on which torch.func simply works.")
_config = typer.Typer(no_args_is_help=True, help="Check a configuration; print the schema of configurations.")
app.add_typer(_config, name="config")
app.command()(inspect)
app.command()(convert)
_BUILT_IN = ("mlp", "attention", "conv", "lstm", "shared", "gpt2", "llama")


@app.callback()
def _main() -> None:
    """Zerofunc."""


@app.command()
def verify(
    stages: Annotated[str, typer.Option(help="ZeRO stages, separated by commas.")] = "0,1,2,3",
    nproc: Annotated[int, typer.Option(min=1, help="Number of ranks to start.")] = 2,
    model: Annotated[
        str, typer.Option(help=f"package.module:factory, or one of {', '.join(_BUILT_IN)}.")
    ] = "attention",
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 0,
    resident_bytes: Annotated[int, typer.Option(min=0, help="Gathered pages kept at stage 3; 0 keeps one.")] = 0,
    page_bytes: Annotated[int, typer.Option(min=1, help="Size of a page.")] = 1024,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write the outcomes to this file.")] = None,
) -> None:
    """Print the table of transforms and stages, measured here and now against plain PyTorch in float64.

    Exit code 1 if a cell that plain PyTorch can do is not ok. A factory returns (module, example input): the module
    maps a floating-point tensor with a batch dimension to a tensor.
    """
    console = Console()
    chosen = _stages(stages)
    path = f"zerofunc.verify.models:{model}" if model in _BUILT_IN else model
    sys.path.insert(0, os.getcwd())
    setting = Setting(path, seed, page_bytes, resident_bytes)
    try:
        setting.inputs(0)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    outcomes = run_table(setting, chosen, nproc, console)
    console.print(_table(outcomes, chosen, setting, nproc))
    _print_details(outcomes, console)
    if as_json is not None:
        as_json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    bad = [outcome for outcome in outcomes if outcome.status not in (OK, CANNOT)]
    count = sum(outcome.status == OK for outcome in outcomes)
    console.print(f"{count} ok, {len(bad)} not ok, {len(outcomes) - count - len(bad)} that PyTorch cannot do")
    console.print(
        "Buffers, such as BatchNorm's statistics, are each rank's own; shard(…, broadcast_buffers=True) says not."
    )
    raise typer.Exit(1 if bad else 0)


@_config.command("check")
def check_config(
    file: Annotated[Path, typer.Argument(help="A configuration in DeepSpeed's JSON format.")],
    world_size: Annotated[int, typer.Option(min=1, help="Number of data-parallel ranks.")] = 1,
) -> None:
    """Print what each key of a configuration gets, and the resolved values. Exit code 1 if any key is refused."""
    try:
        judgement = judge(file, world_size)
    except ConfigError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(config_table(judgement))
    if judgement.config is None:
        raise typer.Exit(1)
    console.print(f"Resolved for world size {world_size}; every key that is not here has its default:")
    console.print_json(judgement.config.model_dump_json(exclude_defaults=True))


@_config.command("schema")
def print_schema() -> None:
    """Print the JSON schema of configurations, for editors."""
    print(json.dumps(json_schema(), indent=2))


def _stages(text: str) -> list[int]:
    try:
        stages = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise typer.BadParameter(f"--stages {text!r}: expected numbers separated by commas") from error
    if not stages or not set(stages) <= {0, 1, 2, 3}:
        raise typer.BadParameter(f"--stages {text!r}: stages are 0, 1, 2 and 3")
    return stages


def run_table(setting: Setting, stages: list[int], nproc: int, console: Console) -> list[Outcome]:
    """All outcomes, with a progress bar. A rank that crashes costs the cell that it was in, not the table."""
    outcomes: list[Outcome] = []
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with bar, RankPool(nproc, timeout_s=1800) as pool:
        task = bar.add_task("starting ranks", total=len(stages) * len(CELLS))
        for stage in stages:
            waiting = [cell.name for cell in CELLS]
            while waiting:
                found = _run_stage(pool, setting, stage, waiting, bar, task)
                outcomes += found
                waiting = waiting[len(found) :]
    return outcomes


def _run_stage(
    pool: RankPool, setting: Setting, stage: int, names: list[str], bar: Progress, task: TaskID
) -> list[Outcome]:
    """Outcomes of the named cells in order, up to one in which a rank crashed."""
    done: list[list[Outcome]] = [[] for _ in range(pool.world_size)]

    def progress(rank: int, message: dict[str, object]) -> None:
        if "done" in message:
            outcome = message["done"]
            assert isinstance(outcome, Outcome)
            done[rank].append(outcome)
            bar.update(task, advance=1 if rank == 0 else 0)
        elif rank == 0:
            bar.update(task, description=f"stage {stage}: {message['begins']}")

    try:
        return merge(pool.run(verify_rank, setting, stage, names, on_progress=progress))
    except RankError as error:
        finished = min(len(outcomes) for outcomes in done)
        bar.update(task, advance=1)
        crash = Outcome(names[finished], stage, ERROR, "; ".join(
            f"rank {rank} {text.strip().splitlines()[0]}" for rank, text in error.failures.items()
        ))  # fmt: skip
        return [*merge([outcomes[:finished] for outcomes in done]), crash]


def _table(outcomes: list[Outcome], stages: list[int], setting: Setting, nproc: int) -> Table:
    versions = f"zerofunc {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    name = setting.model.rpartition(":")[2]
    precision = "float64" if setting.is_double else "float64 with float32 inside"
    table = Table(title=f"{name}, {nproc} ranks, {precision}; {versions}")
    table.add_column("transform \\ stage", no_wrap=True)
    for stage in stages:
        table.add_column(str(stage), justify="center", min_width=7)
    by_cell = {(outcome.cell, outcome.stage): outcome for outcome in outcomes}
    section = ""
    for cell in CELLS:
        if cell.section != section:
            section = cell.section
            table.add_section()
            table.add_row(f"[bold]{section}[/bold]")
        table.add_row(cell.name, *(_mark(by_cell[cell.name, stage]) for stage in stages))
    return table


def _mark(outcome: Outcome) -> str:
    colour = {OK: "green", CANNOT: "yellow"}.get(outcome.status, "bold red")
    return f"[{colour}]{outcome.status}[/{colour}]"


def _print_details(outcomes: list[Outcome], console: Console) -> None:
    seen: dict[tuple[str, str, str], list[int]] = {}
    for outcome in outcomes:
        if outcome.status != OK:
            seen.setdefault((outcome.cell, outcome.status, outcome.detail), []).append(outcome.stage)
    for (cell, status, detail), at in seen.items():
        console.print(f"{cell}, stage {', '.join(map(str, at))}: {status}: {detail}", markup=False)


if __name__ == "__main__":
    app()
