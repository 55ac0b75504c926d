"""``deepspeed.utils.zero_to_fp32``: there are no checkpoint files yet, so there is nothing to convert."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "this version writes no checkpoint files, so that there is none to convert. "
        "zerofunc.unshard(module, zerofunc.shards(module)) gives the full float32 parameters, on all ranks; save those"
    )


get_fp32_state_dict_from_zero_checkpoint = _refuse
convert_zero_checkpoint_to_fp32_state_dict = _refuse
load_state_dict_from_zero_checkpoint = _refuse
