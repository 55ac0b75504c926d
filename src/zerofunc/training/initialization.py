"""From a module and a configuration to an engine: shard, then build optimizer, schedule and loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from zerofunc.config import Config, ConfigError, Defaults, load_config
from zerofunc.data.loaders import RankLoader, rank_loader
from zerofunc.module.sharding import (
    Sharding,
    shard,
    sharding_of,
)
from zerofunc.optimizers.sharded import OptimizerFactory, make_optimizer
from zerofunc.ranks.collectives import joined_ranks
from zerofunc.ranks.launch import DEFAULT_MASTER_PORT, init_distributed, require_started
from zerofunc.schedules import build_scheduler
from zerofunc.training.engine import Engine
from zerofunc.training.precision import DTYPES
from zerofunc.training.progress import log_to_console
from zerofunc.training.settings import shard_options

SchedulerFactory = Callable[[Optimizer], LRScheduler]


def initialize(
    model: nn.Module | None = None,
    config: str | os.PathLike[str] | dict[str, Any] | None = None,
    optimizer: Optimizer | OptimizerFactory | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    mesh: DeviceMesh | None = None,
    *,
    args: Any = None,
    config_params: str | os.PathLike[str] | dict[str, Any] | None = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    defaults: Defaults | None = None,
) -> tuple[Engine, Optimizer | None, RankLoader | None, LRScheduler | None]:
    """Collective. Shard ``model`` and make the engine that trains it.

    Starts torch.distributed from the launcher's environment where it is not started. Every rank begins with the
    parameters of the first rank.

    Args:
        model: A module in float32 (or float64); ``bf16`` and ``fp16`` in the config choose what it computes in.
        config: Path, JSON text or dict in DeepSpeed's format.
        optimizer: An optimizer built on the model's parameters, which is moved to the shards with its groups, or a
            function from parameter groups to one. Overrides the config's.
        model_parameters: Parameters or group dicts to train; all trainable ones by default.
        training_data: A dataset; the loader gives each rank its own part in micro-batches.
        lr_scheduler: A schedule of ``optimizer``, or a function from the optimizer to one. Overrides the config's.
        collate_fn: For the loader.
        mesh: One axis (shard) or two (replicate, shard) of data-parallel ranks.
        args: A namespace whose ``deepspeed_config`` is the config, where ``config`` is not given.
        config_params: Another name of ``config``.
        dist_init_required: False says that torch.distributed is started already.
        distributed_port: Port of the first machine, where the launcher's environment names none.
        mpu: Must be None: there is no model parallelism; ``mesh`` says which ranks are data-parallel.
        defaults: From the config's values to what is taken, and logged, for dotted keys that are absent.

    Returns:
        ``(engine, optimizer, dataloader, lr_scheduler)``; what does not apply is None.

    Raises:
        ConfigError: If the config contradicts itself or cannot be honoured.
        ValueError: If the model or an argument cannot be used.
    """
    given = one_config(config, config_params, args)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    if mpu is not None:
        raise ValueError("mpu is given, but there is no model parallelism; give mesh=, of the data-parallel ranks")
    if lr_scheduler is not None and not callable(lr_scheduler) and not isinstance(optimizer, Optimizer):
        raise ValueError("lr_scheduler is an instance; give the optimizer instance that it schedules too")
    num_ranks = _started_ranks(dist_init_required, distributed_port) if mesh is None else mesh.size()
    resolved = load_config(given, num_ranks, defaults)
    if resolved.log_level is not None:
        log_to_console(resolved.log_level)
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    _cast_buffers(model, resolved)
    is_first = "_zerofunc" not in model.__dict__
    shard(model, mesh=mesh, **shard_options(model, resolved))
    sharding = sharding_of(model)
    _begin_anew(sharding, resolved)
    if resolved.zerofunc.rounded_masters and is_first:
        for page in sharding.pages:  # before the optimizer, which may copy them
            page.master.copy_(page.master.to(page.dtype))
    allow_untested = resolved.zero_allow_untested_optimizer
    sharding.optimizer = made = make_optimizer(model, optimizer, resolved.optimizer, model_parameters, allow_untested)
    schedule = _scheduler(resolved, made, lr_scheduler)
    loader = _loader(sharding, resolved, training_data, collate_fn)
    return Engine(model, resolved, made, schedule, loader), made, loader, schedule


def _begin_anew(sharding: Sharding, config: Config) -> None:
    """Local, the same on all ranks. Let a new engine begin on a module that had one before: no gradient is left.

    Raises:
        ValueError: If the former one rounded its masters, and this one does not, or the other way round.
    """
    rounding = {"zerofunc.rounded_masters": config.zerofunc.rounded_masters}
    sharding.refuse_other(rounding)
    sharding.settings.update(rounding)
    sharding.reducer.discard()
    for name in sharding.places:
        sharding.shard(name).grad = None


def one_config(config: Any, config_params: Any, args: Any) -> Any:
    """The configuration, from the one place that gives it."""
    named = getattr(args, "deepspeed_config", None)
    given = [value for value in (config, config_params, named) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"expected one configuration in config, config_params or args.deepspeed_config, found {len(given)}"
        )
    return given[0]


def _started_ranks(dist_init_required: bool | None, port: int | None) -> int:
    """Collective. The number of ranks, torch.distributed being started."""
    joined = joined_ranks()
    if joined is not None:
        return joined[1]
    if dist_init_required is False:
        require_started()
    return init_distributed(start_alone=False, master_port=port or DEFAULT_MASTER_PORT)


def _cast_buffers(model: nn.Module, config: Config) -> None:
    """Cast floating-point buffers where the configuration says so; they keep their type otherwise."""
    dtype = DTYPES.get(config.data_types.buffer_dtype or "")
    for module in model.modules() if dtype is not None else ():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _scheduler(
    config: Config, optimizer: Optimizer | None, lr_scheduler: LRScheduler | SchedulerFactory | None
) -> LRScheduler | None:
    if lr_scheduler is not None and not callable(lr_scheduler):
        return lr_scheduler
    if lr_scheduler is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise ValueError("there is a scheduler but no optimizer to schedule")
    if lr_scheduler is not None:
        return lr_scheduler(optimizer)
    assert config.scheduler is not None
    return build_scheduler(optimizer, config.scheduler.type, config.scheduler.params)


def _loader(
    sharding: Sharding, config: Config, dataset: Dataset[Any] | None, collate_fn: Callable[[list[Any]], Any] | None
) -> RankLoader | None:
    if dataset is None:
        return None
    axes, batch_size = sharding.axes, config.train_micro_batch_size_per_gpu
    drop_last = config.dataloader_drop_last
    return rank_loader(dataset, batch_size, axes.num_ranks, axes.rank, drop_last=drop_last, collate_fn=collate_fn)
