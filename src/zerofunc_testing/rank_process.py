"""The ranks' side of `zerofunc_testing`: a process that joins a process group and then runs what it is sent."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from io import BytesIO
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Written by libraries when they are first imported or first compile: not a leak of the job.
_LIBRARY_VARIABLES = ("KMP_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")

# The frames that lead to a job's own, which tracebacks leave out.
_OWN_FRAMES = ("zerofunc_testing.rank_process", "zerofunc_testing.pytest_plugin")
_parent: Connection[Any, Any] | None = None


class Setup(NamedTuple):
    """What a rank is told as it starts."""

    rank: int
    world_size: int
    backend: str
    timeout_s: float
    folder: Path
    environment: dict[str, str]


class Job(NamedTuple):
    """One function to run: `call` is the packed (function, arguments); the rest is what unpacking it takes.

    Attributes:
        sys_path: The parent's `sys.path`.
        directory: The parent's working directory.
        main: How to import the parent's main module, as `multiprocessing.spawn` says it; empty if not needed.
        module: The function's module.
        file: The file of that module.
        call: The packed function and arguments.
    """

    sys_path: list[str]
    directory: str
    main: dict[str, str]
    module: str
    file: str | None
    call: bytes


def pack(value: object) -> bytes:
    """Returns `value` pickled with its tensors by value: no shared memory, no file descriptors."""
    import torch

    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Returns the value that `pack` packed, tensors on the CPU. Only for data of one's own processes."""
    import torch

    return torch.load(BytesIO(data), map_location="cpu", weights_only=False)


def stack_file(folder: Path, rank: int) -> Path:
    """Returns the file that a rank dumps its stacks to."""
    return folder / f"rank{rank}.stack"


def on_a_rank() -> bool:
    """Returns whether this process is a rank of a pool."""
    return _parent is not None


def report(message: object) -> None:
    """Sends `message` (picklable) from a rank to the `on_progress` of the run; does nothing elsewhere."""
    if _parent is not None:
        _parent.send_bytes(pack(("report", message)))


def rank_main(setup: Setup, parent: Connection[Any, Any]) -> None:
    """Lives as a rank: joins the group, then runs jobs until the parent says so or is gone."""
    global _parent
    _parent = parent
    with open(stack_file(setup.folder, setup.rank), "w") as stack:
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
        parent.send_bytes(_answer(functools.partial(_join_group, setup)))
        with suppress(EOFError, OSError):
            while data := parent.recv_bytes():
                num_modules = len(sys.modules)
                parent.send_bytes(_answer(functools.partial(_run_job, pickle.loads(data))))
                gc.collect()
                if len(sys.modules) > num_modules:
                    gc.freeze()  # what an import brought along need not be walked after every job
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def _answer(work: Callable[[], object]) -> bytes:
    try:
        return pack(("returned", work()))
    except _LeakError as error:
        return pack(("raised", str(error)))
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_next and trace.tb_frame.f_globals.get("__name__") in _OWN_FRAMES:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        return pack(("raised", f"raised {type(error).__name__}\n{text}"))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _join_group(setup: Setup) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # torch.distributed's, which it does not export to type checkers

    # A daemon may have no children of its own, but data loaders want some.
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(setup.environment)
    for prefix in ("", "LOCAL_"):
        os.environ[f"{prefix}RANK"] = str(setup.rank)
        os.environ[f"{prefix}WORLD_SIZE"] = str(setup.world_size)
    torch.set_num_threads(1)
    if setup.backend == "nccl":
        torch.cuda.set_device(setup.rank % torch.cuda.device_count())
    dist.init_process_group(
        setup.backend,
        store=FileStore(str(setup.folder / "store"), setup.world_size),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=2 * setup.timeout_s),  # the pool's own limit, which shows stacks, comes first
    )
    gc.collect()
    gc.freeze()


def _run_job(job: Job) -> Any:
    import torch

    sys.path[:] = job.sys_path
    os.chdir(job.directory)
    if job.main:
        spawn.prepare(job.main)
    _import(job.module, job.file)
    function, args = unpack(job.call)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    before = _global_state()
    result = function(*args)
    _check_leaks(before, _global_state())
    return result


def _import(name: str, file: str | None) -> None:
    """Imports a module by name or, where test runners loaded it from a place off the path, from its file."""
    if name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if file is None or error.name not in (name, name.partition(".")[0]):
            raise
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


class _LeakError(Exception):
    pass


def _global_state() -> dict[str, object]:
    import torch

    state: dict[str, object] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast on cpu": torch.is_autocast_enabled("cpu"),
        "autocast on cuda": torch.is_autocast_enabled("cuda"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "number of threads": torch.get_num_threads(),
    }
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_LIBRARY_VARIABLES)}
    return state | {f"environment variable {name}": value for name, value in variables.items()}


def _check_leaks(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if names:
        changes = [f"{name} (from {before.get(name)} to {after.get(name)})" for name in names]
        raise _LeakError(f"left global state changed: {', '.join(changes)}")
