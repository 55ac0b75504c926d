"""What a process learns of its place from the launcher's environment, and what it leaves there."""

import logging
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import zerofunc.ranks.launch
from zerofunc.ranks.launch import Placement, expand_hosts, find_master, find_placement, init_distributed

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{k}": v for k, v in [("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")]
}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_GTIDS": "2,3"}
ELSEWHERE = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}  # the daemons that an mpirun starts


# ---- rank and size -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "node1"}, None),
        ({"SLURM_NTASKS": "4"}, None),  # the shell of salloc
        ({"SLURM_PROCID": "0"}, None),  # a batch script without -n
        (TORCHRUN, Placement(3, 4, 1, 2, "torchrun")),
        (OPEN_MPI, Placement(3, 4, 1, 2, "Open MPI")),
        (MVAPICH, Placement(3, 4, 1, 2, "MVAPICH")),
        (PMI, Placement(3, 4, 1, 2, "MPI (PMI)")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "0"}, Placement(0, 2, 0, None, "MPI (PMI)")),
        (SLURM, Placement(3, 4, 1, 2, "SLURM")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, Placement(3, 8, 1, 2, "SLURM")),
        (TORCHRUN | ELSEWHERE, Placement(3, 4, 1, 2, "torchrun")),
        (OPEN_MPI | ELSEWHERE, Placement(3, 4, 1, 2, "Open MPI")),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}, Placement(3, 4, 1, 2, "MPI (PMI)")),  # srun --mpi=pmi2
        (SLURM | {"RANK": "3", "WORLD_SIZE": "4"}, Placement(3, 4, 1, 2, "torchrun")),  # exported by a job script
        (ELSEWHERE | {"RANK": "3", "WORLD_SIZE": "4"}, Placement(3, 4, None, None, "torchrun")),
        (SLURM | {"WORLD_SIZE": "4", "LOCAL_RANK": "0"}, Placement(3, 4, 1, 2, "SLURM")),
        (TORCHRUN | {"RANK": ""}, "WORLD_SIZE is 4, but RANK is not set"),
        ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK is set, but OMPI_COMM_WORLD_SIZE is not"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4; expected less than the 4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is '-1'; expected an integer >= 0"),
        ({"SLURM_PROCID": "one", "SLURM_NTASKS": "4"}, "SLURM_PROCID is 'one'"),
        (SLURM | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but SLURM started 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2 on this host contradicts"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, "local rank 1 of 5 on this host contradicts"),
    ],
)
def test_the_innermost_launcher_places_a_process(environment, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            find_placement(environment)
    else:
        assert find_placement(environment) == expected


# ---- where rank 0 is ---------------------------------------------------------------------------------------------

NODES = {"SLURM_JOB_NODELIST": "n[08-09,12],gpu1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN | {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"}, ("node1", 1234)),
        (TORCHRUN | {"MASTER_ADDR": "node1"}, ("node1", 29500)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, ("127.0.0.1", 29500)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("127.0.0.1", 29500)),
        (SLURM | NODES, ("n08", 29500)),
        (SLURM | NODES | {"SLURM_JOB_ID": "123456"}, ("n08", 10000 + 123456 % 20000)),
        (SLURM | NODES | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}, ("n08", 17926)),
        (SLURM | NODES | {"SLURM_JOB_ID": "7", "MASTER_PORT": "1234"}, ("n08", 1234)),
        (SLURM | NODES | {"SLURM_STEP_NODELIST": "n12,gpu1"}, ("n12", 29500)),
        (SLURM | NODES | {"MASTER_ADDR": "gpu1"}, ("gpu1", 29500)),
        (SLURM | {"SLURM_JOB_NODELIST": "n08"}, ("127.0.0.1", 29500)),
        (TORCHRUN, "rank 3 of 4 .torchrun. does not know where rank 0 is: set MASTER_ADDR"),
        (OPEN_MPI | NODES, "does not know where rank 0 is"),  # mpirun need not put it on the first host
        (TORCHRUN | {"MASTER_ADDR": "node1", "MASTER_PORT": "99999"}, "MASTER_PORT is 99999"),
        (SLURM | {"SLURM_JOB_NODELIST": "n[8-"}, "node list 'n.8-': expected hosts"),
    ],
)
def test_all_ranks_meet_at_one_place(environment, expected):
    placement = find_placement(environment)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            find_master(environment, placement)
    else:
        assert find_master(environment, placement) == expected


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-010,2]-ib,gpu1", ["n008-ib", "n009-ib", "n010-ib", "n2-ib", "gpu1"]),
        ("rack[1-2]n[7,9]", ["rack1n7", "rack1n9", "rack2n7", "rack2n9"]),
        ("node-a.site.org", ["node-a.site.org"]),
    ],
)
def test_node_lists_expand(nodelist, hosts):
    assert expand_hosts(nodelist) == hosts


names = st.from_regex(r"[a-z][a-z.-]{0,4}", fullmatch=True)
numbers = st.integers(0, 120)


@given(st.lists(st.tuples(names, st.integers(1, 4), st.lists(st.tuples(numbers, st.integers(0, 12)), max_size=3))))
def test_a_node_list_written_with_brackets_expands_to_its_hosts(groups):
    written, hosts = [], []
    for name, width, ranges in groups:
        spans = [(f"{first:0{width}d}", f"{first + more:0{width}d}") for first, more in ranges]
        inside = ",".join(first if first == last else f"{first}-{last}" for first, last in spans)
        written.append(f"{name}[{inside}]" if ranges else name)
        counted = [f"{name}{n:0{width}d}" for first, more in ranges for n in range(first, first + more + 1)]
        hosts += counted if ranges else [name]
    assert expand_hosts(",".join(written)) == hosts


@pytest.mark.parametrize("nodelist", ["n[1-3", "n]1", "n[]", "n[a-b]", "n1,,n2", "n1 n2", "n[1-2-3]", ","])
def test_a_malformed_node_list_is_refused(nodelist):
    with pytest.raises(ValueError, match="node list"):
        expand_hosts(nodelist)


# ---- joining -----------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Sets the environment to what is given; a group that a test starts ends with it, and so do its variables."""
    before = dict(os.environ)

    def launch(**variables):
        for name in list(os.environ):
            if name.startswith(("SLURM", "OMPI", "PMI", "MASTER_")) or name in TORCHRUN:
                del os.environ[name]
        os.environ.update(variables)

    launch()
    yield launch
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def joined(monkeypatch):
    """Collects the calls that would start torch.distributed."""
    calls = []
    monkeypatch.setattr(zerofunc.ranks.launch, "join_processes", lambda *args: calls.append(args) or 4)
    return calls


def test_scripts_find_torchruns_variables_under_slurm(launched, joined):
    launched(**SLURM, **NODES, SLURM_JOB_ID="7", LOCAL_RANK="0")
    assert init_distributed("gloo", 30.0) == 4
    found = {name: os.environ[name] for name in [*TORCHRUN, "MASTER_ADDR", "MASTER_PORT"]}
    assert found == TORCHRUN | {"MASTER_ADDR": "n08", "MASTER_PORT": "10007"}
    assert joined == [("gloo", 30.0, None)]


def test_a_process_alone_starts_a_group_of_one(launched, caplog):
    caplog.set_level(logging.INFO, "zerofunc")
    assert init_distributed(start_alone=False) == 1
    assert not dist.is_initialized()
    assert init_distributed(timeout_s=10) == 1
    assert dist.is_initialized() and os.environ["LOCAL_RANK"] == "0"
    assert "rank 0 of 1, started by nobody" in caplog.text
    assert init_distributed() == 1  # again: nothing happens
    with pytest.raises(ValueError, match="asked for RANK 1, but it is 0 already"):
        init_distributed(rank=1, world_size=2)


def test_a_file_may_be_the_meeting_place(launched, tmp_path):
    assert init_distributed("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1) == 1
    assert dist.get_backend() == "gloo"


def test_arguments_must_agree_with_the_environment(launched, joined):
    launched(**TORCHRUN, MASTER_ADDR="node1")
    with pytest.raises(ValueError, match="asked for RANK 0, but it is 3 already"):
        init_distributed(rank=0, world_size=4)
    with pytest.raises(ValueError, match="rank is 0 and world_size is None: give both"):
        init_distributed(rank=0)
    assert joined == []


def test_nothing_changes_when_the_environment_is_refused(launched, joined):
    launched(**OPEN_MPI)
    before = dict(os.environ)
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        init_distributed()
    assert dict(os.environ) == before and joined == []


def test_ranks_that_do_not_meet_are_told_where_they_waited(launched):
    launched(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with pytest.raises(RuntimeError, match="rank 1 of 2 did not meet the others at 127.0.0.1:1:.*under SLURM by srun"):
        init_distributed("gloo", timeout_s=1)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
def test_nccl_is_gloo_without_an_accelerator(launched, joined, caplog):
    caplog.set_level(logging.INFO, "zerofunc")
    launched(**TORCHRUN, MASTER_ADDR="node1")
    assert init_distributed(dist_backend="nccl") == 4
    assert joined == [("gloo", None, None)] and "so it is gloo" in caplog.text


@pytest.mark.world_size(2)
def test_a_running_group_is_left_as_it_is():
    assert init_distributed("nccl") == 2
    assert dist.get_backend() == "gloo"


# ---- accelerators ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "num_devices", "expected"),
    [
        (Placement(3, 4, 1, 2), 2, 1),
        (Placement(3, 4, 1, 2), 1, 0),  # each task sees its own device alone
        (Placement(3, 4), 1, 0),
        (Placement(3, 4, 1), 4, 1),
        (Placement(3, 4), 2, "gives no local rank to choose among 2 devices: set LOCAL_RANK"),
        (Placement(4, 8, 0, 4), 2, "4 processes on this host, but only 2 accelerators"),
        (Placement(3, 4, 3), 2, "4 processes on this host, but only 2 accelerators"),
    ],
)
def test_the_local_rank_chooses_the_accelerator(monkeypatch, placement, num_devices, expected):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            zerofunc.ranks.launch._choose_device(placement)
    else:
        zerofunc.ranks.launch._choose_device(placement)
        assert chosen == [expected]
