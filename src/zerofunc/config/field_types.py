"""Types of fields: strict, but for the spellings that configurations in use have."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AllowInfNan, BeforeValidator, Field, Strict, WithJsonSchema

__all__ = [
    "AutocastType",
    "Count",
    "DataType",
    "LogLevel",
    "Number",
    "Positive",
    "ReduceOp",
    "Stage",
    "Steps",
    "TagValidation",
]

_SPELLINGS = {
    "bf16": ["bfloat16", "torch.bfloat16"],
    "fp16": ["float16", "torch.float16", "half"],
    "fp32": ["float32", "torch.float32", "float"],
}


def _integral(value: object) -> object:
    """Return 500000000 for the JSON float 5e8, anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _finite_or_none(value: object) -> object:
    """Return None for infinity, which launchers write to say "never"."""
    return None if isinstance(value, float) and math.isinf(value) else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _short_name(value: object) -> object:
    """Return "bf16", "fp16" or "fp32" for each spelling of a data type, anything else unchanged."""
    return next((short for short, others in _SPELLINGS.items() if _lower(value) in (short, *others)), value)


def _long_name(value: object) -> object:
    """Return torch's name for each spelling of a data type, anything else unchanged."""
    return next((others[0] for short, others in _SPELLINGS.items() if short == _short_name(value)), value)


def _named(*shorts: str) -> WithJsonSchema:
    """Return the schema of a data type in every spelling."""
    return WithJsonSchema({"enum": [name for short in shorts for name in (short, *_SPELLINGS[short])]})


_INTEGRAL = BeforeValidator(_integral)

Count = Annotated[int, Strict(), Field(ge=0), _INTEGRAL]
Positive = Annotated[int, Strict(), Field(gt=0), _INTEGRAL]
Stage = Annotated[int, Strict(), Field(ge=0, le=3), _INTEGRAL]
Number = Annotated[float, Strict(), AllowInfNan(False)]
DataType = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_short_name), _named("fp32", "fp16", "bf16")]
AutocastType = Annotated[Literal["bfloat16", "float16"], BeforeValidator(_long_name), _named("bf16", "fp16")]
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)]
TagValidation = Annotated[Literal["ignore", "warn", "fail"], BeforeValidator(_lower)]
ReduceOp = Annotated[Literal["mean", "sum"], BeforeValidator(_lower)]
Steps = Annotated[Positive | None, BeforeValidator(_finite_or_none)]
