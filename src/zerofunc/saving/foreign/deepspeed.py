"""DeepSpeed's checkpoint folders, of ZeRO stages 0 to 3.

Where things are, https://github.com/deepspeedai/DeepSpeed 0.19: ``*model_states.pt`` has the module's state (empty
tensors at stage 3), names, buffers, counters and what the user gave; ``*zero_pp_rank_N*optim_states.pt`` has what rank
N keeps of masters and optimizer state, flattened. At stages 1 and 2 each group of parameters is one flat tensor that is
cut into equal parts; at stage 3 each parameter is cut, and a rank's parts follow one another.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from zerofunc.saving import folders
from zerofunc.saving.foreign.alignment import names_by_shape, names_by_value
from zerofunc.saving.foreign.found import Found, Joined, Lazy
from zerofunc.saving.foreign.pickles import DEEPSPEED, StandIn, load
from zerofunc.saving.manifest import CheckpointError, some

_logger = logging.getLogger("zerofunc.saving")

_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "micro_steps",
    "autotp_uc_info", "rng_states", "zero3_sub_group_param_shapes",
}  # fmt: skip


def read(source: Path, tag: str | None, allow_pickle: bool) -> Found | None:
    """What is in such a folder, or None if it is none."""
    folder = _folder(source, tag)
    if folder is None:
        return None
    files = _Files(folder, allow_pickle)
    model = files.model[0]
    found = Found(folder.name)
    found.scheduler = model.get("lr_scheduler")
    found.steps = {name: int(model.get(name) or 0) for name in found.steps}
    config = model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    found.config = config or None
    found.micro_steps = found.steps["global_steps"] * _accumulation_steps(config, int(model.get("dp_world_size") or 1))
    found.client_state = {key: value for key, value in model.items() if key not in _OWN}
    kind = str((config.get("optimizer") or {}).get("type", "")).lower() or None
    if kind == "adam" and config["optimizer"].get("params", {}).get("adam_w_mode", True):
        kind = "adamw"
    if not files.optimizer:
        _add_module(found, model)
        _add_whole(found, model, kind)
    else:
        _add_parts(found, files, kind)
    found.loss_scale = _loss_scale(files.optimizer[0] if files.optimizer else model.get("optimizer") or {})
    return found


def _accumulation_steps(config: dict[str, Any], num_ranks: int) -> int:
    given, total, micro = (config.get(name) for name in (
        "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"
    ))  # fmt: skip
    if isinstance(given, int):
        return given
    known = isinstance(total, int) and isinstance(micro, int)
    return max(total // (micro * num_ranks), 1) if known else 1  # type: ignore[operator]


def _loss_scale(state: dict[str, Any]) -> dict[str, Any] | None:
    """A dynamic loss scale, in the words of :class:`zerofunc.training.precision.LossScaler`."""
    scaler = vars(state["loss_scaler"]) if isinstance(state.get("loss_scaler"), StandIn) else state
    if "last_overflow_iter" not in scaler or not scaler.get("dynamic", scaler.get("dynamic_loss_scale", True)):
        return None
    good = scaler["cur_iter"] - scaler["last_overflow_iter"] - 2  # so that it is raised in the same step as there
    left = int(scaler.get("cur_hysteresis", -1))
    return {"dynamic": True, "scale": float(scaler["cur_scale"]), "_good_steps": good, "_overflows_left": left}


def _folder(source: Path, tag: str | None) -> Path | None:
    """The folder with the files."""
    folder = source
    if tag is not None or not any(source.glob("*_states.pt")):
        tag = tag if tag is not None else folders.latest(source)
        folder = source / tag if tag is not None else source
    return folder if any(folder.glob("*_states.pt")) else None


class _Files:
    """The files of all ranks, mapped.

    Attributes:
        model: Model states; one, or at stage 3 one of each rank.
        optimizer: States of the optimizer by rank; none at stage 0.
    """

    def __init__(self, folder: Path, allow_pickle: bool) -> None:
        paths = {path.name: path for path in sorted(folder.glob("*.pt"))}
        experts = [name for name in paths if "expert" in name or re.match(r"layer_\d+-model", name)]
        if experts or any(re.search(r"mp_rank_0*[1-9]", name) for name in paths):
            raise CheckpointError(
                f"{folder} is split by something else than data parallelism (model, pipeline or expert parallelism: "
                f"{some(experts or paths)}), which cannot be read; gather it with DeepSpeed first"
            )
        models = {name: path for name, path in paths.items() if name.endswith("model_states.pt")}
        if not models:
            raise CheckpointError(f"{folder} has no *model_states.pt")
        self.model = [load(path, allow_pickle, DEEPSPEED) for path in self._by_rank(models, folder)]
        degrees = self.model[0].get("checkpoint_parallel_dimensions") or {}
        if max(self.model[0].get("mp_world_size") or 1, degrees.get("pp_degree", 1), degrees.get("tp_degree", 1)) > 1:
            raise CheckpointError(f"{folder} is split by something else than data parallelism: {degrees}")
        parts = {name: path for name, path in paths.items() if name.endswith("optim_states.pt")}
        states = [load(path, allow_pickle, DEEPSPEED) for path in self._by_rank(parts, folder)] if parts else []
        self.optimizer = [state["optimizer_state_dict"] for state in states]
        if self.optimizer:
            count = self.optimizer[0].get("partition_count", len(self.optimizer))
            num_ranks = max(count) if isinstance(count, list) else count
            num_models = num_ranks if "fp32_flat_groups" in self.optimizer[0] else 1
            for kind, have, need in (("model", len(models), num_models), ("optim", len(parts), num_ranks)):
                if have != need:
                    raise CheckpointError(f"{folder} has {have} files *{kind}_states.pt, of {need} that were saved")

    @staticmethod
    def _by_rank(paths: dict[str, Path], folder: Path) -> list[Path]:
        numbered = {}
        for name, path in paths.items():
            found = re.search(r"zero_pp_rank_(\d+)_", name)
            numbered[int(found[1]) if found else 0] = path
        if missing := sorted(set(range(max(numbered) + 1)) - numbered.keys()):
            lacking = ", ".join(map(str, missing))
            raise CheckpointError(f"{folder} has no file like {next(iter(paths))} of rank {lacking}")
        return [numbered[rank] for rank in sorted(numbered)]


def _add_module(found: Found, model: dict[str, Any]) -> None:
    """Weights and buffers that are there in full."""
    found.add_weights(dict(model["module"]), set(model.get("buffer_names") or ()))


def _trained(found: Found) -> list[tuple[str, Lazy]]:
    """What may be among the parameters of an optimizer, in the module's order."""
    prefix = "model/"
    return [(name.removeprefix(prefix), one) for name, one in found.tensors.items() if name.startswith(prefix)]


# -- stage 0 ----------------------------------------------------------------------------------------------------------


def _add_whole(found: Found, model: dict[str, Any], kind: str | None) -> None:
    """State of an optimizer over whole parameters, which are numbered: names follow from shapes, or from values."""
    state = model.get("optimizer")
    if not state:
        return
    masters = state.get("fp32_groups_flat", state.get("fp32_groups"))  # one tensor a group, or one a parameter
    if masters is not None:
        flats = [one if torch.is_tensor(one) else torch.cat([m.detach().reshape(-1) for m in one]) for one in masters]
        named = [names for flat in flats if (names := names_by_value(flat, _trained(found))) is not None]
        inner = state["optimizer_state_dict"]
        if len(named) == len(flats):
            for number, (flat, names) in enumerate(zip(flats, named, strict=True)):
                is_flat = torch.is_tensor(masters[number])
                _add_flat(found, names, Joined([flat]), [inner["state"].get(number, {}) if is_flat else {}])
                for place, name in [] if is_flat else zip(inner["param_groups"][number]["params"], names, strict=True):
                    _add_entries(found, name, inner["state"].get(place, {}))
            found.add_optimizer(_keys(inner), _paired(named, inner), kind)
            return
    elif "state" in state:
        numbers = [group["params"] for group in state["param_groups"]]
        shapes = [[_shape_of(state["state"].get(number, {})) for number in group] for group in numbers]
        groups = names_by_shape(shapes, [(name, one.shape) for name, one in _trained(found)])
        if groups is not None:
            for number, name in zip(chain(*numbers), chain(*groups), strict=True):
                _add_entries(found, name, state["state"].get(number, {}))
            found.add_optimizer(_keys(state), _paired(groups, state), kind)
            return
    what = "masters and the optimizer's state are" if masters is not None else "the optimizer's state is"
    _logger.warning("%s left out: the files do not say of which parameters", what)


def _shape_of(entries: dict[str, Any]) -> tuple[int, ...] | None:
    tensors = [value for value in entries.values() if torch.is_tensor(value) and value.dim()]
    return tuple(tensors[0].shape) if tensors else None


def _add_entries(found: Found, name: str, entries: dict[str, Any]) -> None:
    for key, value in entries.items():
        if torch.is_tensor(value) and value.dim():
            found.tensors[f"optimizer/{key}/{name}"] = Lazy.of(value)
        else:
            found.values.setdefault(name, {})[key] = _number(value)


def _number(value: Any) -> Any:
    """A value that is not one per element; steps are tensors here."""
    if torch.is_tensor(value):
        return value.clone()
    return torch.tensor(float(value)) if isinstance(value, int) and not isinstance(value, bool) else value


def _keys(state: dict[str, Any]) -> set[str]:
    return {key for entries in state["state"].values() for key in entries}


def _paired(groups: list[Any], state: dict[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    return list(zip(groups, state["param_groups"], strict=False))


# -- stages 1 to 3 ----------------------------------------------------------------------------------------------------


def _add_parts(found: Found, files: _Files, kind: str | None) -> None:
    """Masters and state from the parts of all ranks."""
    model, states = files.model[0], files.optimizer
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    if "fp32_flat_groups" in states[0]:
        buffers = set(model.get("buffer_names") or ())
        found.add_weights(
            {n: one for n, one in model["module"].items() if n in buffers or not torch.is_tensor(one)}, buffers
        )
        inner = [state["optimizer_state_dict"] for state in states]
        _add_stage_3(found, shapes, states, inner)
        _add_frozen(found, files.model)
        found.ties.update(model.get("shared_params") or {})
    else:
        _add_module(found, model)
        inner = [state["base_optimizer_state"] for state in states]
        for number, group in enumerate(shapes):
            flat = Joined([state["single_partition_of_fp32_groups"][number] for state in states])
            paddings = states[0].get("param_alignment_paddings")
            entries = [one["state"].get(number, {}) for one in inner]
            _add_flat(found, group, flat, entries, paddings[number] if paddings else None)
    settings = inner[0]["param_groups"]
    for group in settings:
        if "step" in group and "step" not in _keys(inner[0]):  # where DeepSpeed's Adam kept it once
            for name in chain(*(shapes[number] for number in group["params"])):
                found.values.setdefault(name, {})["step"] = _number(group["step"])
    # At stage 3 a group may have several flat tensors, each with a number.
    named = [list(chain(*(shapes[number] for number in group["params"]))) for group in settings]
    found.add_optimizer(_keys(inner[0]), _paired(named, inner[0]), kind)


def _add_flat(
    found: Found, names: Any, flat: Joined, entries: list[dict[str, Any]], paddings: Sequence[int] | None = None
) -> None:
    """A group that is one flat tensor: masters, and state of which each rank has its part in ``entries``.

    After each parameter there are as many elements that mean nothing as ``paddings`` says.
    """
    keys = {key for key, value in entries[0].items() if torch.is_tensor(value) and value.dim()}
    joined = {key: Joined([one[key] for one in entries if key in one]) for key in keys}
    start = 0
    for name, padding in zip(names, paddings or [0] * len(names), strict=True):
        shape = names[name] if isinstance(names, dict) else found.tensors[f"model/{name}"].shape
        found.tensors[f"model/{name}"] = flat.lazy(start, shape)
        for key in keys:
            found.tensors[f"optimizer/{key}/{name}"] = joined[key].lazy(start, shape)
        for key in entries[0].keys() - keys:
            found.values.setdefault(name, {})[key] = _number(entries[0][key])
        start += math.prod(shape) + padding


def _add_stage_3(found: Found, shapes: list[dict[str, Any]], states: list[Any], inner: list[Any]) -> None:
    """Parameters that are cut one by one."""
    ranks = len(states)
    flats = {"": [Joined(_listed(state["fp32_flat_groups"])) for state in states]}
    entries = inner[0]["state"].get(0, {})
    for key in (key for key, value in entries.items() if torch.is_tensor(value) and value.dim()):
        flats[key] = [Joined([one["state"][number][key] for number in sorted(one["state"])]) for one in inner]
    start = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        numel = math.prod(shape)
        part = -(-numel // ranks)
        for key, of_ranks in flats.items():
            path = f"optimizer/{key}/{name}" if key else f"model/{name}"
            found.tensors[path] = _cut(of_ranks, start, part, shape)
        for key in entries.keys() - flats.keys():
            found.values.setdefault(name, {})[key] = _number(entries[key])
        start += part


def _cut(of_ranks: list[Joined], start: int, part: int, shape: tuple[int, ...]) -> Lazy:
    """A tensor of which each rank has a part that begins at the same place."""

    def read() -> torch.Tensor:
        return torch.cat([one.range(start, start + part) for one in of_ranks])[: math.prod(shape)]

    return Lazy(of_ranks[0].parts[0].dtype, shape, read)


def _add_frozen(found: Found, models: list[dict[str, Any]]) -> None:
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        fragments = [Joined([model["frozen_param_fragments"][name]]) for model in models]
        part = fragments[0].parts[0].numel()
        found.tensors[f"model/{name}"] = _cut(fragments, 0, part, tuple(shape))


def _listed(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]
