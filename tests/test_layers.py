"""`ranks/` and the rank pool use torch.distributed; checkpoints go through DCP."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
# comm.py is what scripts written for DeepSpeed communicate with by themselves.
MAY_COMMUNICATE = ("zerofunc/ranks/", "zerofunc_testing/", "zerofunc/compat/deepspeed/comm.py")
FILES = [
    file for file in sorted(SOURCE.rglob("*.py")) if not file.relative_to(SOURCE).as_posix().startswith(MAY_COMMUNICATE)
]
TYPES = {"DeviceMesh", "ProcessGroup"}
DISTRIBUTED = "torch.distributed"
CHECKPOINTS = f"{DISTRIBUTED}.checkpoint."  # plans and storage; it communicates on the group that Axes gives


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses_of_distributed(tree: ast.AST, allowed: str = "-") -> list[str]:
    """What a module takes from torch.distributed, other than types and what begins as allowed, as `line: name`."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith(DISTRIBUTED)]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        for name in names:
            inside = (name == DISTRIBUTED or name.startswith(f"{DISTRIBUTED}.")) and not name.startswith(allowed)
            # `torch.distributed` as an attribute is judged by the longer chain around it, unless it is stored whole.
            if inside and name.rpartition(".")[2] not in TYPES and not is_prefix_of_type(tree, node):
                found.append(f"{node.lineno}: {name}")
    return found


def is_prefix_of_type(tree: ast.AST, node: ast.AST) -> bool:
    chains = [chain for chain in ast.walk(tree) if isinstance(chain, ast.Attribute) and chain.attr in TYPES]
    return any(node in ast.walk(chain) for chain in chains)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_only_collectives_communicates(file):
    allowed = CHECKPOINTS if "saving" in file.relative_to(SOURCE).parts else "-"
    assert uses_of_distributed(ast.parse(file.read_text(encoding="utf-8")), allowed) == []


@pytest.mark.parametrize(
    ("line", "is_allowed"),
    [
        ("from torch.distributed import ProcessGroup", True),
        ("from torch.distributed.device_mesh import DeviceMesh", True),
        ("def f(group: torch.distributed.ProcessGroup): ...", True),
        ("import torch", True),
        ("import torch.distributed as dist", False),
        ("from torch import distributed", False),
        ("from torch.distributed import all_reduce", False),
        ("from torch.distributed.device_mesh import init_device_mesh", False),
        ("torch.distributed.all_reduce(tensor)", False),
        ("communicate = torch.distributed", False),
        ("torch.distributed.nn.functional.all_reduce(tensor)", False),
        ("from torch.distributed.checkpoint.planner import SavePlan", False),
    ],
)
def test_the_check_itself(line, is_allowed):
    assert (uses_of_distributed(ast.parse(line)) == []) == is_allowed
