"""``init_distributed`` and ``add_config_arguments``: how a script starts."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from zerofunc.ranks import launch


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = launch.DEFAULT_MASTER_PORT,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Collective. :func:`zerofunc.ranks.launch.init_distributed`; a process that nobody launched is a group of one.

    Args:
        dist_backend: By default the accelerator's own, or gloo where there is none.
        auto_mpi_discovery: Accepted; MPI's variables are always read, after torchrun's.
        distributed_port: Where rank 0 is met, if MASTER_PORT does not say.
        verbose: Accepted.
        timeout: Of torch.distributed's groups.
        init_method: A URL where ranks meet.
        dist_init_required: False: torch.distributed must be started already.
        config: Accepted.
        rank: This process's number, where the caller launched the processes; -1 leaves it to the environment.
        world_size: How many there are, likewise.

    Raises:
        RuntimeError: If torch.distributed is not started though it must be.
    """
    if dist_init_required is False:
        launch.require_started()
        return
    launch.init_distributed(
        dist_backend,
        None if timeout is None else timeout.total_seconds(),
        init_method=init_method,
        rank=None if rank < 0 else rank,
        world_size=None if world_size < 0 else world_size,
        master_port=distributed_port,
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with ``--deepspeed`` and ``--deepspeed_config``, also under their oldest spellings."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configuration")
    for name, is_old in (("deepspeed", False), ("deepscale", True)):
        switch = argparse.SUPPRESS if is_old else "for the script's own use"
        path = argparse.SUPPRESS if is_old else "path of the JSON configuration"
        group.add_argument(f"--{name}", action="store_true", help=switch)
        group.add_argument(f"--{name}_config", dest="deepspeed_config", help=path)
    return parser
