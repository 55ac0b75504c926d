"""A pool of rank processes that stay up: run a function on every rank of a real process group, many times.

`RankPool(2).run(function, *args)` returns what `function` returned on each rank. The processes are forked from a
server that has torch loaded already, join one process group over a file (no ports), and wait for the next
function, so a further run costs milliseconds. A run ends in results or in a `RankError` that says what each
rank did: its traceback, the signal it died of, or, for a rank that never came back, the stack it was left in.

Nothing else of zerofunc is imported here, and torch only when a pool runs.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection as mp_connection
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from zerofunc_testing.rank_process import Job, Setup, on_a_rank, pack, rank_main, report, stack_file, unpack

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

__all__ = ["RankError", "RankPool", "report", "shared_pool"]

_START_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 5.0
_DUMP_TIMEOUT_S = 2.0
_PRELOAD = ["numpy", "torch", "torch.distributed", "torch.distributed.device_mesh"]


class RankError(RuntimeError):
    """A run failed on some rank.

    Attributes:
        failures: What happened, by rank: the likely cause first (ranks that died, then ranks that raised in the
            order of time, then ranks that had to be killed). Ranks that returned are absent.
    """

    def __init__(self, message: str, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class RankPool:
    """Processes that hold the ranks of one process group and run functions on demand.

    The processes start at the first run, and again at the first run after a failure. They take the environment
    of that moment, and RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; each uses one thread.

    Args:
        world_size: The number of ranks; 1 is a real process group of one.
        backend: The backend of `torch.distributed.init_process_group`.
        timeout_s: The seconds a run may take, unless it says otherwise.
        grace_s: The seconds the other ranks may go on after the first failure.

    Raises:
        ValueError: `world_size` is below 1.
        RuntimeError: The pool is made on a rank: most often by a script without `if __name__ == "__main__":`.
    """

    def __init__(self, world_size: int, backend: str = "gloo", timeout_s: float = 120.0, grace_s: float = 5.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, found {world_size}")
        if on_a_rank():
            raise RuntimeError(
                "a rank cannot start a RankPool; if a script did so while a rank imported it, "
                'put its last lines under `if __name__ == "__main__":`'
            )
        self.world_size = world_size
        self.backend = backend
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self._ranks: list[_Rank] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        on_progress: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Returns the results of `function(*args)` on every rank, in rank order.

        Before each run a rank seeds torch, numpy and random with 0; after it, the rank must have left the global
        state (default dtype, grad mode, autocast, determinism, threads, environment) as it was.

        Args:
            function: A function at the top level of a module, or a `functools.partial` of one. Ranks import its
                module; a script's is imported without its `if __name__ == "__main__":` part.
            *args: Pickled to every rank, tensors by value.
            timeout_s: The seconds until ranks that still run are killed; the pool's `timeout_s` by default.
            on_progress: Called here as `on_progress(rank, message)` for each `report(message)` of a rank.

        Raises:
            RankError: A rank raised, died, hung or changed global state.
            TypeError: The function or its arguments cannot be pickled.
        """
        __tracebackhide__ = True
        name = _name(function)
        job = _job(function, args, name)
        if not self._ranks:
            self._start()
        try:
            for rank in self._ranks:
                with suppress(OSError):  # a rank that died meanwhile: the wait says so
                    rank.connection.send_bytes(job)
            return self._wait(name, self.timeout_s if timeout_s is None else timeout_s, on_progress)
        except BaseException:
            self._stop(at_once=True)
            raise

    def close(self) -> None:
        """Ends the processes; a later run starts new ones."""
        self._stop(at_once=False)
        atexit.unregister(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        atexit.register(self.close)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        folder = Path(tempfile.mkdtemp(prefix="zerofunc-ranks-"))
        try:
            for index in range(self.world_size):
                here, there = context.Pipe()
                setup = Setup(index, self.world_size, self.backend, self.timeout_s, folder, _environment())
                process = context.Process(target=rank_main, args=(setup, there), daemon=True, name=f"rank {index}")
                with _main_hidden():
                    process.start()
                there.close()
                self._ranks.append(_Rank(process, here, folder))
            self._wait("the start of the pool", _START_TIMEOUT_S, None)
        except BaseException:
            self._stop(at_once=True)
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _wait(self, name: str, timeout_s: float, on_progress: Callable[[int, Any], None] | None) -> list[Any]:
        __tracebackhide__ = True
        results, failures = _await_ranks(self._ranks, timeout_s, self.grace_s, on_progress)
        if not failures:
            return [results[index] for index in range(self.world_size)]
        failures.sort(key=lambda failure: _CAUSES.index(failure.kind))
        listed = ", ".join(str(index) for index in sorted(failure.rank for failure in failures))
        header = f"{name} failed on rank{'s' if len(failures) > 1 else ''} {listed} of {self.world_size}"
        sections = [f"--- rank {failure.rank} {failure.text}".rstrip() for failure in failures]
        raise RankError("\n".join([header, *sections]), {failure.rank: failure.text for failure in failures})

    def _stop(self, *, at_once: bool) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            if at_once:
                rank.process.kill()
            with suppress(OSError):
                rank.connection.send_bytes(b"")
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for rank in ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.connection.close()
            shutil.rmtree(rank.folder, ignore_errors=True)


_pools: dict[int, RankPool] = {}


def shared_pool(world_size: int) -> RankPool:
    """Returns this process's kept pool of `world_size` ranks; `close_shared_pools` or the process's end closes it."""
    if world_size not in _pools:
        _pools[world_size] = RankPool(world_size)
    return _pools[world_size]


def close_shared_pools() -> None:
    """Closes every pool of `shared_pool`."""
    while _pools:
        _pools.popitem()[1].close()


# ---- the parent's side -------------------------------------------------------------------------------------------

_CAUSES = ("died", "raised", "stuck")


class _Rank(NamedTuple):
    process: BaseProcess
    connection: Connection[Any, Any]
    folder: Path


class _Failure(NamedTuple):
    rank: int
    kind: str
    text: str


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(_innermost(function), "__qualname__", function))


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _job(function: Callable[..., Any], args: Sequence[Any], name: str) -> bytes:
    if "<locals>" in name or "<lambda>" in name:
        raise TypeError(f"{name} must be a function at the top level of a module: ranks import it by name")
    try:
        call = pack((function, args))
    except Exception as error:
        raise TypeError(f"{name} and its arguments must be picklable to run on ranks: {error}") from error
    data = spawn.get_preparation_data("") if b"__main__" in call else {}
    main = {key: value for key, value in data.items() if key.startswith("init_main")}
    module = getattr(_innermost(function), "__module__", None) or "builtins"
    file = getattr(sys.modules.get(module), "__file__", None)
    return pickle.dumps(Job(list(sys.path), os.getcwd(), main, module, file, call))


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keeps multiprocessing from importing the program's main module in every rank as it starts."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _await_ranks(
    ranks: Sequence[_Rank], timeout_s: float, grace_s: float, on_progress: Callable[[int, Any], None] | None
) -> tuple[dict[int, Any], list[_Failure]]:
    """Returns the results by rank and the failures in the order of time; ranks still running at the end are killed."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    running = dict(enumerate(ranks))
    limit = f"after {timeout_s:g} s"
    deadline = time.monotonic() + timeout_s
    while running and (left := deadline - time.monotonic()) > 0:
        mp_connection.wait([end for rank in running.values() for end in (rank.connection, rank.process.sentinel)], left)
        for index, rank in list(running.items()):
            kind, value = _receive(index, rank)
            if kind == "report" and on_progress is not None:
                on_progress(index, value)
            if kind == "returned":
                results[index] = value
            elif kind in _CAUSES:
                if not failures and time.monotonic() + grace_s < deadline:
                    deadline = time.monotonic() + grace_s
                    limit = f"{grace_s:g} s after the first failure"
                failures.append(_Failure(index, kind, value))
            if kind in ("returned", *_CAUSES):
                del running[index]
    return results, failures + _kill_running(running, limit)


def _receive(index: int, rank: _Rank) -> tuple[str, Any]:
    """Returns the next message of a rank as (kind, value), ("", None) if there is none yet."""
    alive = rank.process.is_alive()  # asked first: what a dead rank sent is then in the pipe already
    try:
        if rank.connection.poll():
            kind, value = unpack(rank.connection.recv_bytes())
            return kind, value
    except (EOFError, ConnectionResetError):
        alive = False
    return ("", None) if alive else ("died", _obituary(index, rank))


def _obituary(index: int, rank: _Rank) -> str:
    rank.process.join(_CLOSE_TIMEOUT_S)
    code = rank.process.exitcode
    if code is None or code >= 0:
        return f"ended with exit code {code}\n{stack_file(rank.folder, index).read_text()}"
    try:
        cause = signal.Signals(-code).name
    except ValueError:
        cause = f"signal {-code}"
    return f"died of {cause}\n{stack_file(rank.folder, index).read_text()}"


def _kill_running(running: Mapping[int, _Rank], limit: str) -> list[_Failure]:
    """Makes the ranks write their stacks, kills them, and returns where each was."""
    for rank in running.values():
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
    failures = []
    for index, rank in running.items():
        stack = _settled_text(stack_file(rank.folder, index))
        rank.process.kill()
        failures.append(_Failure(index, "stuck", f"was still running {limit}, here (newest call first):\n{stack}"))
    return failures


def _settled_text(path: Path) -> str:
    deadline = time.monotonic() + _DUMP_TIMEOUT_S
    before = ""
    while time.monotonic() < deadline:
        text = path.read_text(errors="replace")
        if text and text == before:
            return text
        before = text
        time.sleep(0.05)
    return before or "(no stack was written)"
