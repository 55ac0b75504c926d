"""Init: a context in which modules are built sharded, each parameter as soon as it is registered."""

from __future__ import annotations

import os
import zlib
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from zerofunc.config import load_config
from zerofunc.module.first_values import first_rank_numbers, home_device
from zerofunc.pages.building import build_page, replace_parameters, swap
from zerofunc.pages.layout import ParameterSpec, build_pages
from zerofunc.pages.paged_tensor import PagedTensor
from zerofunc.pages.pager import Pager
from zerofunc.ranks.buffers import below_transforms
from zerofunc.ranks.collectives import axes_of
from zerofunc.ranks.launch import init_distributed

aten = torch.ops.aten


class Init:
    """Collective. A context in which every parameter is split over the ranks as soon as a module registers it.

    For models that no rank can hold whole. Constructors run as ever: what they, ``nn.init`` and ``module.apply`` write
    goes into the shards. PyTorch's generators draw on all ranks what they draw on the first, so that the model is the
    one that the first rank would have built without the context. A rank holds its shards and a parameter or two at a
    time. Afterwards :func:`zerofunc.shard` or :func:`zerofunc.initialize` makes pages of them, for any stage::

        with zerofunc.Init():
            model = Model(config)  # or AutoModel.from_pretrained(folder)
        engine, *_ = zerofunc.initialize(model, "ds_config.json")

    Every rank runs the same program inside; what it draws from other generators (NumPy's) must be the same on all.
    Parameters on the meta device stay there until they are assigned real ones, as ``from_pretrained`` does, or are
    loaded by :func:`zerofunc.load_safetensors`. Beside an accelerator, parameters go there, and so does what is drawn
    into them later. The arguments are DeepSpeed's.

    Args:
        module: Built already: its parameters are split at once.
        data_parallel_group: None, or a group of all ranks; ``mesh`` says otherwise which ranks share the parameters.
        mem_efficient_linear: Accepted; linear layers need no replacement.
        remote_device: ``cpu`` keeps the shards on the CPU beside an accelerator, as ``offload_param`` in the config.
        pin_memory: Accepted.
        config_dict_or_path: A configuration; at stages 0 to 2, where every rank holds all parameters, nothing is done.
        config: The same.
        enabled: Whether anything is done.
        dtype: Of floating-point parameters, from their registration on. Not needed for ``bf16`` or ``fp16`` in the
            config: :func:`zerofunc.initialize` sees to that, and keeps masters in float32.
        mpu: Must be None.
        mesh: One axis (shard) or two (replicate, shard), as for :func:`zerofunc.shard`.

    Raises:
        ValueError: If an argument cannot be honoured.
        ConfigError: If the configuration cannot.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: str | os.PathLike[str] | dict[str, Any] | None = None,
        config: str | os.PathLike[str] | dict[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        started = init_distributed(start_alone=False) if enabled else 1
        num_ranks = started if mesh is None else mesh.size()
        if mpu is not None:
            raise ValueError("mpu is given, but there is no model parallelism; give mesh=, of the data-parallel ranks")
        if remote_device not in (None, "none", "cpu"):
            raise ValueError(f"remote_device is {remote_device!r}; expected None or 'cpu'")
        if enabled and data_parallel_group is not None and data_parallel_group.size() != num_ranks:
            raise ValueError(f"data_parallel_group has {data_parallel_group.size()} ranks of {num_ranks}; give mesh=")
        given = config_dict_or_path if config_dict_or_path is not None else config
        resolved = None if given is None or not enabled else load_config(given, num_ranks)
        self.enabled = enabled and (resolved is None or resolved.zero_optimization.stage == 3)
        self._dtype = dtype
        offload = resolved.zero_optimization.offload_param if resolved is not None else None
        self._on_cpu = remote_device == "cpu" or (offload is not None and offload.device == "cpu")
        timeout_s = resolved.zerofunc.timeout_s if resolved is not None else None
        if self.enabled:
            self._axes = axes_of(mesh, replicate_all=False, timeout_s=timeout_s)
            self._pager = Pager(self._axes, resident_bytes=0, prefetch=False)
        for inner in module.modules() if module is not None and self.enabled else ():
            for name, parameter in inner._parameters.items():
                self._take(inner, name, parameter)
        self._inside = ExitStack()

    def __enter__(self) -> Init:
        """Collective. Parameters are split from here on."""
        with ExitStack() as entered:
            if self.enabled:
                entered.callback(self._pager.release)
                entered.enter_context(first_rank_numbers(self._axes))
                entered.callback(register_module_parameter_registration_hook(self._take).remove)
            self._inside = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Local. Parameters that are registered from here on stay whole."""
        self._inside.close()

    def _take(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Local. Split a parameter that is being registered, unless it is split already or has no data yet."""
        if parameter is None or isinstance(parameter, PagedTensor) or parameter.is_meta or is_lazy(parameter):
            return
        self._pager.release()
        dtype = self._dtype if self._dtype is not None and parameter.is_floating_point() else parameter.dtype
        shard_alone(parameter, f"{type(module).__name__}.{name}", self._pager, dtype, self._on_cpu)


class DraftParameter(PagedTensor):
    """A stage-3 parameter of a module that is being built: what PyTorch and constructors do to a plain one is allowed.

    ``parameter.data = value`` splits another value, also of another shape or data type, as ``module.half()`` assigns.
    """

    @property
    def data(self) -> torch.Tensor:
        """The same parameter without gradient; writing into it writes the shards."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, PagedTensor) and value._place == self._place and not value._chain:
            return
        new = nn.Parameter(value.detach(), self.requires_grad)
        if isinstance(new, PagedTensor):
            swap(self, new)
        else:
            page = self._place.page
            shard_alone(new, self._place.name, self._pager, new.dtype, on_cpu=page.master.device != page.device)
            swap(self, new)
            self._place.page.parameters = [self]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As of any stage-3 parameter; parametrizations give values by ``set_``."""
        if func is aten.set_.source_Tensor and (args[0].shape, args[0].dtype) == (args[1].shape, args[1].dtype):
            func = aten.copy_.default
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if type(result) is PagedTensor:  # as nn.Parameter asks of detach()
            result.__class__ = DraftParameter
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedTensor:
        """A draft on a copy of the page."""
        copied = super().__deepcopy__(memo)
        copied.__class__ = DraftParameter
        return copied


def shard_alone(parameter: nn.Parameter, name: str, pager: Pager, dtype: torch.dtype, on_cpu: bool = False) -> None:
    """Local. Make a parameter a :class:`DraftParameter`, its identity kept, on a page of its own.

    Ranks need not do so in the same order, and build the same values; what they have built is compared when the module
    is sharded as a whole.
    Its shards are of its own data type: masters are made when the module is sharded as a whole.
    """
    device = home_device() if parameter.device.type in ("cpu", "meta") else parameter.device
    spec = ParameterSpec(name, parameter.shape, (dtype, device, parameter.requires_grad))
    (layout,) = build_pages([spec], pager.axes.shard.size, page_numel=1)
    with below_transforms():
        is_compared = pager.axes.num_ranks > 1 and not parameter.is_meta
        checksum = _checksum(parameter.detach()) if is_compared else None
        page = build_page(layout, [parameter], 3, pager.axes, low_precision=True, on_cpu=on_cpu, are_alike=True)
        replace_parameters(page, [parameter], pager)
        if checksum is not None:
            page.built = checksum, page.versions()
    parameter.__class__ = DraftParameter  # type: ignore[assignment]


def _checksum(value: torch.Tensor) -> int:
    return zlib.crc32(value.cpu().reshape(-1).view(torch.uint8).numpy().data)
