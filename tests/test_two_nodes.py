"""Training across hosts, and under launchers other than torchrun, equals one process. Hosts are network namespaces."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from reference import Net, adamw, build, fit

pytestmark = pytest.mark.slow

NUM_STEPS = 3
TIMEOUT_S = 10
HOSTS = ("10.77.0.1", "10.77.0.2")
SCRIPT = """
import os, sys
import torch
import zerofunc
from reference import Net, build, config, fit, values

folder, num_steps, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
assert zerofunc.init_distributed() == 2
rank = int(os.environ["RANK"])
engine = zerofunc.initialize(build(Net), config(3, zerofunc={"timeout_s": timeout_s}))[0]
for step in range(num_steps):
    engine.backward(fit(engine, step, rank))
    engine.step()
    if step == 2:
        print("training", flush=True)
torch.save(values(engine.module), f"{folder}/rank{rank}.pt")
"""


# ---- hosts -------------------------------------------------------------------------------------------------------


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def hosts():
    """Two network namespaces, joined by a cable: their names. Whatever runs in them ends with the test."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and ip of iproute2")
    names = [f"zerofunc{os.getpid()}{letter}" for letter in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here (CAP_NET_ADMIN, veth): {error.stderr.strip()}")
        for name, address in zip(names, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            kill_all(name)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=30)


def kill_all(host):
    """End all processes of a namespace at once, as a host that loses its power does."""
    listed = subprocess.run(["ip", "netns", "pids", host], check=False, capture_output=True, text=True, timeout=30)
    for pid in listed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def start(command, **variables):
    """A process that finds zerofunc and reference.py, with the given variables and none of another launcher."""
    launchers = ("SLURM", "OMPI", "PMI", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent / "src")])
    environment = inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def arguments(folder, num_steps):
    return [str(folder), str(num_steps), str(TIMEOUT_S)]


def start_nodes(hosts, command):
    """torchrun of a script with its arguments on both hosts, with one rank each."""
    return [
        start(
            ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
             "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOSTS[0]}:29400",
             "--rdzv-id", "test", "--rdzv-conf", f"is_host={int(address == HOSTS[0])}", "--local-addr", address,
             *command],
            GLOO_SOCKET_IFNAME="cable",
        )
        for name, address in zip(hosts, HOSTS, strict=True)
    ]  # fmt: skip


def finish(processes):
    """Wait for processes that must succeed."""
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()


# ---- training ----------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def assert_trained(folder):
    """Both ranks have the parameters of one process that has seen the data of both."""
    model = build(Net)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        torch.stack([fit(model, step, rank) for rank in range(2)]).mean().backward()
        optimizer.step()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for rank in range(2):
        torch.testing.assert_close(torch.load(folder / f"rank{rank}.pt"), expected, rtol=1e-9, atol=1e-11)


def test_two_nodes_train_as_one_process(hosts, script, tmp_path):
    finish(start_nodes(hosts, [script, *arguments(tmp_path, NUM_STEPS)]))
    assert_trained(tmp_path)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def slurm(rank, port):
    ids = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 0}
    return ids | {"SLURM_GTIDS": "0,1", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": port}


def open_mpi(rank, port):
    sizes = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in sizes.items()} | {"MASTER_PORT": port}


@pytest.mark.parametrize("launcher", [slurm, open_mpi])
def test_processes_of_another_launcher_train_as_one_process(launcher, script, tmp_path):
    command, port = [sys.executable, script, *arguments(tmp_path, NUM_STEPS)], free_port()
    places = [{name: str(value) for name, value in launcher(rank, port).items()} for rank in range(2)]
    finish([start(command, **place) for place in places])
    assert_trained(tmp_path)


# ---- the death of a host -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["power", "cable"])
def test_the_death_of_a_node_ends_the_other_with_a_message(hosts, script, tmp_path, cause):
    survivor, victim = start_nodes(hosts, [script, *arguments(tmp_path, 1_000_000)])
    assert survivor.stdout.readline() == "training\n", survivor.communicate(timeout=60)
    if cause == "power":
        kill_all(hosts[1])
    else:
        ip("-n", hosts[1], "link", "set", "cable", "down")  # nobody is told: only the time-out can notice
    began = time.monotonic()
    _, errors = survivor.communicate(timeout=TIMEOUT_S + 60)
    assert survivor.returncode != 0
    assert "DivergenceError: rank" in errors and f"did not come within {TIMEOUT_S} s or has ended" in errors
    assert time.monotonic() - began < TIMEOUT_S + 45  # torchrun takes some of it
    kill_all(hosts[1])
    victim.communicate(timeout=60)
