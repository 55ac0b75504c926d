"""Sharding works whatever process groups the program has made, on the whole world and on parts of it."""

import functools
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zerofunc
from reference import Net, build, fit


@functools.cache
def mesh_of(*ranks):
    """Collective over all ranks, as torch's own meshes are."""
    group = dist.new_group(list(ranks))
    return DeviceMesh.from_group(group, "cpu") if dist.get_rank() in ranks else None


def train(module, ranks):
    """Steps of a sharded module, and of a plain one on the data of the same ranks."""
    plain = build(Net)
    for step in range(2):
        fit(module, step, dist.get_rank()).backward()
        torch.stack([fit(plain, step, rank) for rank in ranks]).mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(zerofunc.full_gradients(module), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_groups_of_some_ranks_come_before_and_between(stage):
    for ranks in ([0], [0, 1], [1, 2], [0, 1]):
        dist.new_group(ranks)
        if dist.get_rank() == 2:
            dist.new_group([2], use_local_synchronization=True)
        options = {"page_bytes": 160, "resident_bytes": 0, "timeout_s": 12 + len(ranks) + ranks[0] / 4 + stage / 16}
        train(zerofunc.shard(build(Net), stage, **options), range(3))


@pytest.mark.world_size(3)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_meshes_of_some_ranks_shard_by_themselves(stage):
    meshes = {ranks: mesh_of(*ranks) for ranks in ((0, 2), (1, 2), (2, 1))}
    for turn in range(2):
        for ranks, mesh in meshes.items():
            if mesh is not None:  # the others do something else meanwhile
                train(zerofunc.shard(build(Net), stage, mesh, page_bytes=160, timeout_s=16 + turn + stage / 16), ranks)
        train(zerofunc.shard(build(Net), stage, page_bytes=160, timeout_s=16 + turn + stage / 16), range(3))


@pytest.mark.world_size(3)
def test_a_rank_outside_the_mesh_is_told_so():
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="rank 2 is not part of the mesh"):
            zerofunc.shard(build(Net), 3, mesh)
    else:
        train(zerofunc.shard(build(Net), 3, mesh, page_bytes=160, timeout_s=17), range(2))


SCRIPT = """
import sys, torch, zerofunc
zerofunc.init_distributed("gloo", timeout_s=3, init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
net = zerofunc.shard(torch.nn.Linear(4, 4), 3, resident_bytes=0)
if sys.argv[2] == "0":
    try:
        net(torch.ones(1, 4))
    except zerofunc.DivergenceError as error:
        print(error)
else:
    sys.stdin.read()  # elsewhere, until the other one has ended
"""


@pytest.mark.slow
def test_the_time_out_of_init_distributed_is_that_of_shard(tmp_path):
    start = [sys.executable, "-c", SCRIPT, f"file://{tmp_path / 'store'}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*start, "1"], **pipes) as other:
        first = subprocess.run([*start, "0"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        other.communicate("")
    assert "another rank did not come within 3 s" in first.stdout, first.stderr
