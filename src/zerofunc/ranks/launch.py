"""Where this process stands among those that were launched together, read from the launcher's environment variables.

torchrun, Open MPI, MVAPICH, MPICH and Intel MPI, and SLURM are asked in that order, so that the inner launcher of a
nested pair wins (torchrun under srun, mpirun in a SLURM job). Everything but :func:`init_distributed` is arithmetic on
a mapping.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from zerofunc.ranks.collectives import join_processes, joined_ranks

_logger = logging.getLogger(__name__)

DEFAULT_MASTER_PORT = 29500
_HOST = r"(?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"


@dataclass(frozen=True)
class Placement:
    """This process among those launched together.

    Attributes:
        rank: Its number among all.
        world_size: How many there are.
        local_rank: Its number on its host; None where the launcher does not say.
        local_world_size: How many there are on its host; None where the launcher does not say.
        launcher: Who says so.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    launcher: str = "the caller"


@dataclass(frozen=True)
class _Launcher:
    """Variables of one launcher; the first that is set counts."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()


_SLURM = _Launcher(
    "SLURM", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",)
)
_LAUNCHERS = (
    _Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    *(
        _Launcher(name, *((f"{prefix}_{part}",) for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
        for name, prefix in (("Open MPI", "OMPI_COMM_WORLD"), ("MVAPICH", "MV2_COMM_WORLD"))
    ),
    _Launcher(
        "MPI (PMI)",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    _SLURM,
)


def find_placement(environment: Mapping[str, str]) -> Placement | None:
    """This process's place by the first launcher that numbers it; None where none does. Local.

    What that launcher leaves open on the host is taken from the others that agree with it on rank and size, such as
    SLURM's local rank where a job script exports RANK and WORLD_SIZE alone.

    Raises:
        ValueError: If a variable is missing, is no number, or contradicts another.
    """
    claims = [claim for launcher in _LAUNCHERS if (claim := _claim(environment, launcher)) is not None]
    total = _integer(environment, ("WORLD_SIZE",))
    if not claims:
        if total is not None and total > 1:
            raise ValueError(
                f"WORLD_SIZE is {total}, but RANK is not set: start every process by torchrun, srun or mpirun"
            )
        return None
    first = claims[0]
    if total is not None and total != first.world_size:
        raise ValueError(
            f"WORLD_SIZE is {total}, but {first.launcher} started {first.world_size} processes: unset WORLD_SIZE"
        )
    agreeing = [claim for claim in claims if (claim.rank, claim.world_size) == (first.rank, first.world_size)]
    local_rank = next((c.local_rank for c in agreeing if c.local_rank is not None), None)
    local_size = next((c.local_world_size for c in agreeing if c.local_world_size is not None), None)
    if local_size is not None and not (local_rank or 0) < local_size <= first.world_size:
        raise ValueError(
            f"local rank {local_rank} of {local_size} on this host contradicts rank {first.rank} of "
            f"{first.world_size} in all ({first.launcher})"
        )
    return Placement(first.rank, first.world_size, local_rank, local_size, first.launcher)


def _claim(environment: Mapping[str, str], launcher: _Launcher) -> Placement | None:
    rank, size = _integer(environment, launcher.rank), _integer(environment, launcher.world_size)
    if rank is None or (size is None and launcher is _SLURM):  # a batch script without -n is one process
        return None
    if size is None:
        raise ValueError(f"{launcher.rank[0]} is set, but {launcher.world_size[0]} is not: set both, or neither")
    if rank >= size:
        raise ValueError(f"{launcher.rank[0]} is {rank}; expected less than the {size} processes that there are")
    local_size = _integer(environment, launcher.local_world_size)
    if launcher is _SLURM and environment.get("SLURM_GTIDS"):
        local_size = len(environment["SLURM_GTIDS"].split(","))
    return Placement(rank, size, _integer(environment, launcher.local_rank), local_size, launcher.name)


def _integer(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The value of the first variable that is set and not empty."""
    for name in names:
        if text := environment.get(name):
            if not text.isdecimal():
                raise ValueError(f"environment variable {name} is {text!r}; expected an integer >= 0")
            return int(text)
    return None


def find_master(
    environment: Mapping[str, str], placement: Placement, port: int = DEFAULT_MASTER_PORT
) -> tuple[str, int]:
    """Address and port at which rank 0 is met, the same on every rank. Local.

    MASTER_ADDR and MASTER_PORT count if set. Otherwise the address is this host if all ranks are on it, and under
    SLURM the first host of the step or job; the port under SLURM comes from the numbers of job and step.

    Args:
        environment: Environment variables.
        placement: What :func:`find_placement` found there.
        port: The port where nothing else chooses one.

    Raises:
        ValueError: If the address cannot be known, or the port is not one.
    """
    hosts: list[str] = []
    if placement.launcher == _SLURM.name:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        hosts = expand_hosts(nodes or environment.get("SLURM_NODELIST") or "")
        port = _slurm_port(environment, port)
    given = _integer(environment, ("MASTER_PORT",))
    port = port if given is None else given
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT is {port}; expected 1 to 65535")
    if address := environment.get("MASTER_ADDR"):
        return address, port
    if placement.local_world_size == placement.world_size or len(hosts) == 1:
        return "127.0.0.1", port
    if hosts:
        return hosts[0], port
    raise ValueError(
        f"rank {placement.rank} of {placement.world_size} ({placement.launcher}) does not know where rank 0 is: set "
        "MASTER_ADDR to the host of rank 0 for every process (mpirun -x MASTER_ADDR=…, or export it before srun)"
    )


def _slurm_port(environment: Mapping[str, str], port: int) -> int:
    """A port below the ephemeral ones, which differs between jobs and between steps of one job."""
    job = _integer(environment, ("SLURM_JOB_ID", "SLURM_JOBID"))
    step = _integer(environment, ("SLURM_STEP_ID", "SLURM_STEPID"))
    return port if job is None else 10000 + (job + 7919 * (step or 0)) % 20000


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of a SLURM node list, in order: ``n[08-10],gpu1`` is n08, n09, n10, gpu1.

    Raises:
        ValueError: If it is not such a list.
    """
    if nodelist and not re.fullmatch(f"{_HOST}(?:,{_HOST})*", nodelist):
        raise ValueError(f"node list {nodelist!r}: expected hosts such as n[01-03,07],gpu1")
    return [host for item in re.findall(_HOST, nodelist) for host in _expand(item)]


def _expand(item: str) -> Iterator[str]:
    parts = re.split(r"\[([^\]]+)\]", item)  # text and ranges in turn
    choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


def require_started() -> None:
    """Local. Raise RuntimeError if torch.distributed is not started, for who says that it need not be."""
    if joined_ranks() is None:
        raise RuntimeError("dist_init_required is False, but torch.distributed is not started; start it first")


def init_distributed(
    dist_backend: str | None = None,
    timeout_s: float | None = None,
    *,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    master_port: int = DEFAULT_MASTER_PORT,
    start_alone: bool = True,
) -> int:
    """Collective. Join the processes that were launched together; the number of ranks.

    Nothing happens where torch.distributed is started already. Otherwise the place of this process comes from
    torchrun's, MPI's or SLURM's environment, its accelerator is chosen by its local rank, and RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set in ``os.environ`` for whoever reads them.

    Args:
        dist_backend: Of torch.distributed; by default, or for "nccl", the accelerator's own, or gloo without one.
        timeout_s: Seconds after which a rank that waits for others raises; by default torch.distributed's.
        init_method: A URL where ranks meet instead of MASTER_ADDR and MASTER_PORT (``file://…``, ``tcp://…``).
        rank: This process's number, with ``world_size``, where the caller launched the processes.
        world_size: How many processes there are.
        master_port: The port of rank 0 where neither MASTER_PORT nor SLURM's job number gives one.
        start_alone: Whether a process that nobody launched starts a group of one rank; otherwise it goes without.

    Raises:
        ValueError: If the environment is incomplete or contradicts itself or the arguments.
        RuntimeError: If the ranks do not meet in time.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank} and world_size is {world_size}: give both, or neither")
    asked = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    joined = joined_ranks()
    known = {"RANK": str(joined[0]), "WORLD_SIZE": str(joined[1])} if joined else os.environ
    for name, value in asked.items():
        if known.get(name, value) != value:
            raise ValueError(f"init_distributed was asked for {name} {value}, but it is {known[name]} already")
    if joined:
        return joined[1]
    if dist_backend == "nccl" and not torch.accelerator.is_available():
        _logger.info("dist_backend is nccl, which needs an accelerator; there is none, so it is gloo")
        dist_backend = "gloo"
    environment = {**os.environ, **asked}
    placement = find_placement(environment)
    if placement is None:
        if not start_alone:
            return 1
        placement = Placement(0, 1, 0, 1, "nobody")
    variables = _variables(placement)
    if placement.world_size > 1 and init_method is None:
        variables["MASTER_ADDR"], port = find_master(environment, placement, master_port)
        variables["MASTER_PORT"] = str(port)
    _choose_device(placement)
    os.environ.update(variables)
    _logger.info("rank %d of %d, started by %s", placement.rank, placement.world_size, placement.launcher)
    return join_processes(dist_backend, timeout_s, init_method)


def _variables(placement: Placement) -> dict[str, str]:
    """What torchrun would have set."""
    values = {
        "RANK": placement.rank,
        "WORLD_SIZE": placement.world_size,
        "LOCAL_RANK": placement.local_rank or 0,
        "LOCAL_WORLD_SIZE": placement.local_world_size,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _choose_device(placement: Placement) -> None:
    """Make the accelerator of this process's local rank the current one, where there are accelerators.

    Raises:
        ValueError: If the host has fewer of them than processes, or it is not known which one is ours.
    """
    if not torch.accelerator.is_available():
        return
    count, local_rank = torch.accelerator.device_count(), placement.local_rank
    if count == 1:  # as where SLURM shows each task its own device alone
        local_rank = 0
    if local_rank is None:
        raise ValueError(f"{placement.launcher} gives no local rank to choose among {count} devices: set LOCAL_RANK")
    needed = max(local_rank + 1, placement.local_world_size or 0) if count > 1 else 1
    if needed > count:
        raise ValueError(f"{needed} processes on this host, but only {count} accelerators: start one process for each")
    torch.accelerator.set_device_index(local_rank)
