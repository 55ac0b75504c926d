"""Plain data with tensors inside, to and from a file: JSON and safetensors, so that reading runs no code of the file.

What a file may hold: None, numbers, strings, bytes, lists, tuples, sets, dicts, tensors, NumPy arrays and numbers, data
types. Everything keeps its type.
"""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerofunc.saving.files import TensorFile, write_tensors

_KEY = "zerofunc"
_SEQUENCES: dict[str, type[Any]] = {
    "size": torch.Size,  # before tuple, which it is as well
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_SCALARS: dict[str, Callable[[str], Any]] = {
    "float": float,  # infinities and NaN
    "bytes": base64.b64decode,
    "dtype": lambda name: getattr(torch, name),
}


def pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """What JSON can say of a value; its tensors, detached, are added to ``tensors``.

    Args:
        value: Plain data.
        path: Where it lies, for errors.
        tensors: What has been found, by the number that stands in its place.

    Raises:
        TypeError: If something in it is not plain data; the message says where.
    """
    if value is None or isinstance(value, (bool, int, str)) and type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is list:
        return [pack(item, f"{path}[{number}]", tensors) for number, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        tensors[str(len(tensors))] = value.detach()
        return {"tensor": str(len(tensors) - 1), "shape": list(value.shape)}
    packed = _pack_other(value, path, tensors)
    if packed is None:
        raise TypeError(
            f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: give plain data (numbers, strings, "
            "lists, dicts, tensors, arrays), such as its state_dict()"
        )
    return packed


def _pack_other(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    """Types that JSON has no word for: ``{type: …}``."""
    if type(value) in (dict, OrderedDict, defaultdict):
        pairs = [
            [pack(key, f"a key of {path}", tensors), pack(item, f"{path}[{key!r}]", tensors)]
            for key, item in value.items()
        ]
        return {"dict": pairs}
    for name, kind in _SEQUENCES.items():
        if type(value) is kind:
            return {name: [pack(item, f"{path}[{number}]", tensors) for number, item in enumerate(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": raw, "of": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"number": base64.b64encode(value.tobytes()).decode(), "of": value.dtype.str}
    return None


def unpack(value: Any, tensors: Callable[[str], torch.Tensor]) -> Any:
    """The value that :func:`pack` was given."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value))
    content = value[kind]
    if kind == "tensor":
        return tensors(content).reshape(value["shape"])
    if kind == "dict":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in content}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([unpack(item, tensors) for item in content])
    if kind in _SCALARS:
        return _SCALARS[kind](content)
    found = np.frombuffer(base64.b64decode(content), value["of"])
    return found[0] if kind == "number" else found.reshape(value["shape"]).copy()


@dataclass(frozen=True)
class Packed:
    """Plain data in the form of a file: text, and the tensors that it refers to.

    Attributes:
        text: JSON.
        tensors: By the names that stand in their places.
    """

    text: str
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, value: Any, name: str) -> Packed:
        """Of a value that errors call ``name``; tensors are not copied. Raises TypeError as :func:`pack`."""
        tensors: dict[str, torch.Tensor] = {}
        return cls(json.dumps(pack(value, name, tensors)), tensors)

    def copied(self) -> Packed:
        """The same with copies of the tensors, on the CPU."""
        return Packed(self.text, {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()})

    def write(self, path: Path) -> None:
        """Write the file to the disk."""
        write_tensors(path, self.tensors, {_KEY: self.text})


def read_packed(path: Path) -> Any:
    """The plain data of a file, tensors on the CPU."""
    with TensorFile(path) as file:
        return unpack(json.loads(file.metadata[_KEY]), lambda key: file.read(key).clone())
