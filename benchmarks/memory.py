"""Memory of one contender, in processes of its own.

    python benchmarks/memory.py stage3 --work func.grad

prints a record in JSON. glibc keeps freed blocks, and the more the larger they were, which hides what a contender no
longer needs. Its thresholds are therefore held at their first values, which only works before a process starts: the
program starts itself anew with them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from contenders import NAMES, WORKS, Paging, build, make_batches, train

from zerofunc_testing.pool import RankPool

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
WARM_UP_STEPS = 2
MEASURED_STEPS = 4


@dataclass(frozen=True)
class Memory:
    """One contender's memory at one kind of work, in bytes: the rank's that has most.

    Attributes:
        held_bytes: Resident anonymous memory between steps, above that after the imports.
        peak_bytes: The most of it during steps.
        gathered_peak_bytes: The most gathered pages alive by zerofunc's own account; None for others.
        gradient_peak_bytes: The most gradient buffers alive, likewise.
    """

    name: str
    work: str
    held_bytes: int
    peak_bytes: int
    gathered_peak_bytes: int | None = None
    gradient_peak_bytes: int | None = None


def measure_apart(name: str, work: str, paging: Paging) -> Memory:
    """The memory of a contender in a process tree of its own.

    Raises:
        RuntimeError: If that failed, with what it wrote.
    """
    sizes = {"--page-mib": paging.page_mib, "--resident-mib": paging.resident_mib}
    options = [part for option, mib in sizes.items() if mib is not None for part in (option, str(mib))]
    command = [sys.executable, __file__, name, "--work", work, *options]
    ended = subprocess.run(command, env=os.environ | MALLOC, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"memory of {name} at {work} could not be measured:\n{ended.stderr}")
    return Memory(**json.loads(ended.stdout.splitlines()[-1]))


def measure(name: str, work: str, paging: Paging) -> Memory:
    """Collective. This rank's memory: trained for a few steps, then measured at ``work``."""
    batches = make_batches(MEASURED_STEPS)
    gc.collect()
    baseline = status_bytes("RssAnon")
    contender = build(name, paging)
    for batch in batches[:WARM_UP_STEPS]:
        train(contender, batch)
        WORKS[work](contender, batch)
    gc.collect()
    held = status_bytes("RssAnon") - baseline
    peak = peak_bytes(lambda: [WORKS[work](contender, batch) for batch in batches]) - baseline
    usage = contender.usage()
    if usage is None:
        return Memory(name, work, held, peak)
    return Memory(name, work, held, peak, usage.gathered_peak_bytes, usage.gradient_peak_bytes)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most anonymous memory of this process while ``run`` works.

    The kernel keeps the maximum of all resident memory. Its other part is code mapped from files, which only grows
    as it is first run, so that the part at the end is taken off.
    """
    Path("/proc/self/clear_refs").write_text("5")  # forget the maximum so far: proc(5)
    run()
    return status_bytes("VmHWM") - status_bytes("RssFile") - status_bytes("RssShmem")


def status_bytes(key: str) -> int:
    """A number of bytes that Linux keeps about this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; memory can be measured on Linux only")


def _largest(records: list[Memory]) -> Memory:
    return max(records, key=lambda record: record.peak_bytes)


def main() -> None:
    """Measure one contender on two ranks and print the record."""
    parser = argparse.ArgumentParser(description="Memory of one contender.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--work", choices=WORKS, default="training")
    parser.add_argument("--page-mib", type=float)
    parser.add_argument("--resident-mib", type=float)
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    with RankPool(2, timeout_s=600.0) as pool:
        records = pool.run(measure, options.name, options.work, Paging(options.page_mib, options.resident_mib))
    print(json.dumps(asdict(_largest(records))))


if __name__ == "__main__":
    main()
