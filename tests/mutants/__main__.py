"""Plants each defect in a copy of the source, and looks whether its tests notice.

python -m mutants            # all
python -m mutants pages      # those whose file or words have this in them
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants.defects import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
AT_A_TIME = 2
LIMIT_S = 600


def node_ids(defect: Defect) -> list[str]:
    """What pytest is asked to run."""
    return [f"tests/{name.replace('::', '.py::')}" + ("" if "::" in name else ".py") for name in defect.tests.split()]


def planted(defect: Defect, folder: Path) -> Path:
    """A copy of the source with the defect."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    file = source / "zerofunc" / defect.file
    text = file.read_text()
    if text.count(defect.old) != 1:
        raise ValueError(f"{defect.file} has {text.count(defect.old)} times what the defect replaces: {defect.old!r}")
    file.write_text(text.replace(defect.old, defect.new))
    return source


def is_noticed(defect: Defect) -> tuple[bool, str]:
    """Whether a test fails with the defect, by an assertion, an error or a hang; and what pytest said last."""
    with tempfile.TemporaryDirectory() as folder:
        source = planted(defect, Path(folder))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
        command += ["-o", f"pythonpath={source}", *node_ids(defect)]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return True, f"no end within {LIMIT_S} s"
    lines = done.stdout.strip().splitlines() or [done.stderr]
    if done.returncode not in (0, 1):  # neither passed nor failed: nothing was tried
        raise RuntimeError(f"{defect.what}: pytest ended with {done.returncode}: {lines[-1]}\n{done.stderr[-500:]}")
    return done.returncode == 1, lines[-1]


def main(words: list[str]) -> int:
    """Try the defects; the number that survive."""
    chosen = [one for one in DEFECTS if not words or any(word in one.file + one.what for word in words)]
    survivors = 0
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        for defect, (noticed, said) in zip(chosen, threads.map(is_noticed, chosen), strict=True):
            survivors += not noticed
            print(f"{'noticed ' if noticed else 'SURVIVES'}  {defect.file}: {defect.what}  ({said})", flush=True)
    print(f"{len(chosen)} defects, {survivors} survive")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
