"""``deepspeed.accelerator``: torch.accelerator, or the CPU, behind the methods that scripts call."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["Accelerator", "get_accelerator"]

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


class Accelerator:
    """The accelerator of this machine, or the CPU where there is none.

    Attributes that are not here, such as ``Stream``, are those of ``torch.cuda``, ``torch.xpu``, ``torch.cpu`` …
    """

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        self._name = "cpu" if found is None else found.type
        self._torch = torch.get_device_module(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    # -- devices ------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """True: the CPU is always there."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether operators have ended when they return."""
        return self._name == "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """What ``torch.device`` takes: "cuda", "cuda:0", "cpu"."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device_count(self) -> int:
        """Number of devices here; 1 for the CPU."""
        return torch.accelerator.device_count() or 1

    def current_device(self) -> int:
        """Number of the current device; 0 for the CPU."""
        return 0 if self._name == "cpu" else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """The current device as ``torch.device`` takes it."""
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""
        if self._name != "cpu":
            torch.accelerator.set_device_index(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the operators under way."""
        if self._name != "cpu":
            torch.accelerator.synchronize(device_index)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """What torch.distributed uses between such devices."""
        return _BACKENDS.get(self._name, self._name)

    # -- random numbers -----------------------------------------------------------------------------------------

    def random(self) -> Any:
        """The module ``torch.random``."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        (torch if self._name == "cpu" else self._torch).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device's generator."""
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """The last seed."""
        return torch.initial_seed() if self._name == "cpu" else self._torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of a device's generator; the current one's by default."""
        if self._name == "cpu":
            return torch.get_rng_state()
        return self._torch.get_rng_state(self.current_device() if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Put back what :meth:`get_rng_state` gave."""
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            self._torch.set_rng_state(new_state, self.current_device() if device_index is None else device_index)

    # -- memory, in bytes; 0 for the CPU, where torch does not count ------------------------------------------------

    def empty_cache(self) -> None:
        """Free what the allocator keeps."""
        if self._name != "cpu":
            torch.accelerator.empty_cache()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """What torch counts."""
        return {} if self._name == "cpu" else dict(torch.accelerator.memory_stats(device_index))

    def memory_allocated(self, device_index: int | None = None) -> int:
        """In tensors now."""
        return 0 if self._name == "cpu" else torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """In tensors at most."""
        return 0 if self._name == "cpu" else torch.accelerator.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Held by the allocator now."""
        return 0 if self._name == "cpu" else torch.accelerator.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Held by the allocator at most."""
        return 0 if self._name == "cpu" else torch.accelerator.max_memory_reserved(device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin to look for the most anew."""
        if self._name != "cpu":
            torch.accelerator.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the device."""
        return 0 if self._name == "cpu" else torch.accelerator.get_memory_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Not taken on the device."""
        return 0 if self._name == "cpu" else torch.accelerator.get_memory_info(device_index)[0]

    # -- data types ---------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return self._name == "cpu" or bool(self._torch.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """What the engine can compute in here."""
        return [torch.float32, torch.float16] + [torch.bfloat16] * self.is_bf16_supported()


@functools.cache
def get_accelerator() -> Accelerator:
    """The one of this process."""
    return Accelerator()
