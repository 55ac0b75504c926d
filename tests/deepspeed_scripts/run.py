"""Runs a script that imports deepspeed on another package: ``run.py PACKAGE SCRIPT [arguments of the script]``.

Its text is the same but for the lines that import: ``import deepspeed`` becomes ``import PACKAGE as deepspeed``, and
``from deepspeed.x import y`` becomes ``from PACKAGE.x import y``.
"""

import re
import sys
from pathlib import Path


def substituted(text, package):
    """The text of a script whose import lines name ``package``."""
    text = re.sub(r"^import deepspeed$", f"import {package} as deepspeed", text, flags=re.MULTILINE)
    return re.sub(r"^from deepspeed\b", f"from {package}", text, flags=re.MULTILINE)


def load(path, package, name):
    """The names that a script defines, run as ``name``."""
    names = {"__name__": name, "__file__": str(path)}
    exec(compile(substituted(Path(path).read_text(encoding="utf-8"), package), str(path), "exec"), names)
    return names


if __name__ == "__main__":
    package, script, *rest = sys.argv[1:]
    sys.argv = [script, *rest]
    load(script, package, "__main__")
