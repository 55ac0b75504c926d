"""The part of an engine that saves and loads checkpoints."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zerofunc.config import Config
from zerofunc.data.loaders import RankLoader
from zerofunc.module.full_values import full_state
from zerofunc.module.sharding import Sharding
from zerofunc.saving.checkpoints import Options, Saver, load
from zerofunc.saving.export import export
from zerofunc.saving.files import write_pickled
from zerofunc.saving.state import Run, Wanted
from zerofunc.saving.together import together
from zerofunc.training.accumulation import Accumulation
from zerofunc.training.precision import LossScaler

_logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]


class Resumable:
    """The part of :class:`zerofunc.Engine` that saves and loads."""

    module: nn.Module
    config: Config
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    training_dataloader: RankLoader | None
    loss_scaler: LossScaler
    global_steps: int
    skipped_steps: int
    global_samples: int
    _sharding: Sharding
    _accumulation: Accumulation
    _batches: Iterator[Any] | None
    _saver: Saver | None = None
    _exit_dir: Folder | None = None
    _is_exit_asked = False

    def save_checkpoint(
        self,
        save_dir: Folder,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool | None = None,
        keep_last: int | None = None,
    ) -> bool:
        """Collective. Save all that training needs to go on, at any stage and on any number of ranks.

        Masters, buffers, optimizer state, accumulated gradients, schedule, loss scale, counters, the loader's position
        and every rank's random generators; and, to be looked up, the configuration. The checkpoint is seen when it is
        complete; a save that fails, or is killed, leaves the earlier ones as they are. Files hold no code.

        Args:
            save_dir: A folder that all ranks share. One job at a time saves into it.
            tag: Name of the checkpoint; ``global_step{N}`` by default. One of that name is replaced.
            client_state: Plain data (numbers, strings, lists, dicts, tensors, arrays), the first rank's.
            save_latest: Whether ``load_checkpoint`` without a tag finds it.
            exclude_frozen_parameters: Leave out parameters that require no gradient; loading leaves them as they are.
            asynchronous: Return once a copy is in memory and save that in the background. The next save waits for it,
                and so do :meth:`wait_for_checkpoint` and the end of the process. The configuration's by default.
            keep_last: Remove all but this many newest checkpoints afterwards. The configuration's by default.

        Returns:
            True.

        Raises:
            CheckpointError: On every rank, if one of them cannot write, or an earlier save in the background failed.
            ValueError: If an argument cannot be used.
            RuntimeError: If the module has other parameters than were sharded.
        """
        self._sharding.check_intact()
        if not os.fspath(save_dir):
            raise ValueError("save_dir is empty; expected a folder")
        ours = self.config.zerofunc.checkpoint
        keep_last = ours.keep_last if keep_last is None else keep_last
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; expected an integer > 0")
        more = {
            "client_state": dict(client_state or {}),
            "counters": self._counters(),
            "config": self.config.model_dump(mode="json"),
        }
        options = Options(save_latest, exclude_frozen_parameters, keep_last)
        background = ours.asynchronous if asynchronous is None else asynchronous
        self._saver = self._saver or Saver(self._run())
        self._saver.save(Path(save_dir), self._agreed_tag(tag), more, self.global_steps, options, background)
        return True

    def load_checkpoint(
        self,
        load_dir: Folder,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Collective. Go on from a checkpoint, of any stage and number of ranks, whatever the precision.

        On as many ranks as saved it training goes on bit for bit; on others to rounding, with other random numbers.

        Args:
            load_dir: The folder that it was saved into.
            tag: Its name; by default the one that ``latest`` names.
            load_module_strict: Raise if names of parameters or buffers differ; otherwise load those that are there.
            load_optimizer_states: Optimizer state and accumulated gradients, too.
            load_lr_scheduler_states: The schedule, too.
            load_module_only: Weights and buffers alone.
            custom_load_fn: Must be None.

        Returns:
            The checkpoint's folder, and ``client_state``; ``(None, {})``, with a warning, if ``tag`` is None and there
            is no ``latest``.

        Raises:
            CheckpointError: On every rank, with nothing changed, if the checkpoint is missing, damaged or does not fit.
        """
        if custom_load_fn is not None:
            raise ValueError(
                "custom_load_fn is given; other formats are read by load_safetensors, or by `zerofunc convert`"
            )
        self.wait_for_checkpoint()
        all_of_it = not load_module_only
        wanted = Wanted(
            load_module_strict, all_of_it and load_optimizer_states, all_of_it and load_lr_scheduler_states, all_of_it
        )
        loaded = load(self._run(), Path(load_dir), tag, wanted, self._counter_misfits if wanted.optimizer else None)
        if loaded is None:
            _logger.warning("%s has no file 'latest': nothing is loaded; give the tag of a checkpoint", load_dir)
            return None, {}
        if all_of_it:
            self._set_counters(loaded.shared["counters"], load_optimizer_states)
            self._batches = None
        return str(loaded.folder), loaded.shared["client_state"]

    def save_16bit_model(
        self, save_dir: Folder, save_filename: str | None = None, exclude_frozen_parameters: bool = False
    ) -> bool:
        """Collective. Write the module's weights, in the data type that it computes in, for others to load.

        Args:
            save_dir: A folder.
            save_filename: By default safetensors as :func:`zerofunc.export` writes them. A name that ends in ``.bin``,
                ``.pt`` or ``.pth`` is one file by ``torch.save``, of full copies that the first rank holds meanwhile.
            exclude_frozen_parameters: Leave out parameters that require no gradient.

        Returns:
            True.

        Raises:
            CheckpointError: On every rank, if the first one cannot write.
            ValueError: On every rank, if the file name has another ending.
        """
        if save_filename is None:
            export(self.module, save_dir, exclude_frozen=exclude_frozen_parameters)
            return True
        if not save_filename.endswith((".bin", ".pt", ".pth")):
            raise ValueError(f"save_filename is {save_filename!r}; expected .bin, .pt or .pth, or None for safetensors")
        state = full_state(self.module, rank=0, with_frozen=not exclude_frozen_parameters)
        path = Path(save_dir) / save_filename
        together(self._sharding.axes, lambda: write_pickled(path, state) if state else None, f"save of {path}")
        return True

    save_fp16_model = save_16bit_model

    def wait_for_checkpoint(self) -> None:
        """Local. Wait until the checkpoint that is being saved in the background is complete.

        Raises:
            CheckpointError: If it could not be saved.
        """
        if self._saver is not None:
            self._saver.wait()

    def save_on_exit(self, save_dir: Folder) -> None:
        """Local, on all ranks. From now on SIGTERM to any rank ends the next :meth:`step` with a checkpoint and exit.

        The exit code is 143, as if the signal had ended the process. Each step then costs one small exchange.

        Raises:
            ValueError: Outside the main thread, where signals cannot be handled.
        """
        signal.signal(signal.SIGTERM, self._ask_for_exit)
        self._exit_dir = save_dir

    def _ask_for_exit(self, *_: object) -> None:
        self._is_exit_asked = True

    def _exit_if_asked(self) -> None:
        """Collective where :meth:`save_on_exit` was called."""
        if self._exit_dir is None:
            return
        if self._sharding.axes.any(torch.tensor([self._is_exit_asked], dtype=torch.uint8)).item():
            self.save_checkpoint(self._exit_dir, asynchronous=False)
            _logger.warning("saved into %s and ending, as SIGTERM asked", self._exit_dir)
            raise SystemExit(128 + signal.SIGTERM)

    def _run(self) -> Run:
        return Run(self._sharding, self.optimizer, self.lr_scheduler, self.training_dataloader)

    def _agreed_tag(self, tag: str | None) -> str:
        """Collective. The tag; what the configuration says where ranks have different ones."""
        mine = f"global_step{self.global_steps}" if tag is None else str(tag)
        tags = self._sharding.axes.gather_objects(mine, "tag of a checkpoint")
        if len(set(tags)) > 1:
            text = f"ranks save under different tags: {tags}"
            validation = self.config.checkpoint.tag_validation.lower()
            if validation == "fail":
                raise ValueError(f"{text}; give the same on all")
            if validation == "warn" and self._sharding.axes.rank == 0:
                _logger.warning("%s; the first rank's is taken", text)
        return str(tags[0])

    def _counters(self) -> dict[str, Any]:
        steps = {name: getattr(self, name) for name in ("global_steps", "skipped_steps", "global_samples")}
        return {"steps": steps, "accumulation": self._accumulation.state(), "loss_scale": dict(vars(self.loss_scaler))}

    def _counter_misfits(self, more: Mapping[str, Any]) -> list[str]:
        misfit = self._accumulation.misfit(more["counters"]["accumulation"])
        return [misfit] if misfit else []

    def _set_counters(self, counters: Mapping[str, Any], with_gradients: bool) -> None:
        vars(self).update(counters["steps"])
        place = {} if with_gradients else {"place": 0, "backwards": 0}
        self._accumulation.restore({**counters["accumulation"], **place})
        self.loss_scaler.restore(counters["loss_scale"])
