"""``initialize`` with DeepSpeed's signature and defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from zerofunc.compat.deepspeed.launch import init_distributed
from zerofunc.compat.deepspeed.optimizer_views import with_loss_scale
from zerofunc.compat.deepspeed.parameter_views import with_views
from zerofunc.ranks.launch import DEFAULT_MASTER_PORT
from zerofunc.training import initialization
from zerofunc.training.engine import Engine

__all__ = ["initialize"]

ConfigSource = str | os.PathLike[str] | dict[str, Any]
LOW_PRECISION = ("bf16", "fp16")


def defaults(given: Mapping[str, Any]) -> dict[str, object]:
    """What DeepSpeed takes for absent keys, where zerofunc takes something else.

    Args:
        given: The values of the configuration.
    """
    taken: dict[str, object] = {"gradient_clipping": 1.0}
    for dtype in LOW_PRECISION:
        section = given.get(dtype)
        if isinstance(section, dict) and section.get("enabled") is True:
            taken["zerofunc.rounded_masters"] = True
            taken["data_types.grad_accum_dtype"] = taken["communication_data_type"] = dtype
    return taken


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    distributed_port: int = DEFAULT_MASTER_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
) -> tuple[Engine, Optimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Collective. :func:`zerofunc.initialize` with the arguments in DeepSpeed's order and its defaults.

    Absent ``gradient_clipping`` is 1.0. Under bf16 and fp16 masters start from the rounded parameters, and gradients
    are added up and reduced in the parameters' type, unless keys of the configuration say otherwise. The log names what
    is taken. Epochs of the loader have the same order unless the script calls ``loader.data_sampler.set_epoch``. At
    stage 3 parameters have the ``ds_*`` views, and the optimizer has ``loss_scale`` and the like.

    Args:
        args: A namespace with ``deepspeed_config``, where neither ``config`` nor ``config_params`` is given.
        model: As there.
        optimizer: As there.
        model_parameters: As there.
        training_data: As there.
        lr_scheduler: As there.
        distributed_port: Where rank 0 is met, if MASTER_PORT does not say.
        mpu: Must be None: there is no model parallelism.
        dist_init_required: False: torch.distributed must be started already.
        collate_fn: As there.
        config: As there.
        mesh_param: Must be None: there is no sequence parallelism.
        config_params: Another name of ``config``.

    Raises:
        ConfigError: If there is no config or several, or it cannot be honoured.
        ValueError: If the model or an argument cannot be used.
    """
    if mesh_param is not None:
        raise ValueError("mesh_param is given, but there is no sequence parallelism: all ranks are data-parallel")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    given = initialization.one_config(config, config_params, args)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    engine, made, loader, schedule = initialization.initialize(
        model,
        given,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        collate_fn,
        dist_init_required=dist_init_required,
        mpu=mpu,
        defaults=defaults,
    )
    if loader is not None:
        loader.reshuffles = False  # the script may call loader.data_sampler.set_epoch
        loader.data_sampler = loader.sampler
    with_views(model)
    if made is not None:
        with_loss_scale(made, engine)
    return engine, made, loader, schedule
