"""Reading torch files and pickles of others: tensors, plain data and inert stand-ins, unless code is allowed."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from zerofunc.saving.manifest import CheckpointError


class StandIn:
    """An object of a class that is not there: what was pickled of it, as attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args


DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes of which DeepSpeed's files have objects."""


def load(source: Path | BinaryIO, allow_pickle: bool, stand_ins: tuple[str, ...] = ()) -> Any:
    """What ``torch.save`` has written, over the mapped file if it is one.

    Raises:
        CheckpointError: If it cannot be read, or would run code and may not.
    """
    classes: dict[str, type] = {name: type(name.rpartition(".")[2], (StandIn,), {}) for name in stand_ins}
    try:
        # A file of the format before torch 1.6 cannot be mapped.
        options: dict[str, Any] = {"map_location": "cpu", "mmap": isinstance(source, Path) and _is_zip(source)}
        if allow_pickle:
            return torch.load(source, weights_only=False, pickle_module=_module(classes), **options)
        with torch.serialization.safe_globals([(kind, name) for name, kind in classes.items()]):
            return torch.load(source, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines()
        reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
        raise CheckpointError(
            f"{source} holds more than tensors and plain data ({reason}), which would run code when it is read. If you "
            "trust it, allow_pickle=True or --allow-pickle does so"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{source} cannot be read: {error!r}") from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _module(classes: Mapping[str, type]) -> Any:
    """A module like pickle, in which some classes are others."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return classes.get(f"{module}.{name}") or super().find_class(module, name)

    def loads(file: BinaryIO, **options: Any) -> Any:
        return Unpickler(file, **options).load()

    return types.SimpleNamespace(__name__="pickle", Unpickler=Unpickler, load=loads)


class Restricted(pickle.Unpickler):
    """Reads a pickle whose objects are of some classes only.

    Args:
        content: The pickle.
        allowed: Those classes, by ``module.name``.
        path: Where it comes from, for errors.
    """

    def __init__(self, content: bytes, allowed: Mapping[str, Any], path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = allowed
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """One of the allowed classes.

        Raises:
            CheckpointError: If it is another one.
        """
        found = self._allowed.get(f"{module}.{name}")
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise CheckpointError(f"{self._path} holds {module}.{name}, which does not belong there: it is not read")
        return found
