"""A run whose number of ranks changes under torchrun, with kills between, equals one process that is left alone."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, default_collate

from elastic_job import BATCH, NUM_SAMPLES, NUM_STEPS, Numbered, loss_of
from reference import Net, adamw, build

HERE = Path(__file__).parent


class Agents:
    """Agents of torchrun, each with one worker, which find each other: one node each."""

    def __init__(self, folder, stage):
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4", "--nproc-per-node", "1",
            "--max-restarts", "20", "--monitor-interval", "0.2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", "last_call_timeout=6,keep_alive_interval=1",
            str(HERE / "elastic_job.py"), str(folder), str(stage),
        ]  # fmt: skip
        self.running = []

    def start(self):
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        # In torch 2.13 a first rank that stays tells newcomers no address unless this is set.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        output = (self.folder / f"agent_{len(self.running)}.txt").open("w")
        self.running.append(
            subprocess.Popen(self.command, env=environment, stdout=output, stderr=output, start_new_session=True)
        )

    def wait_for_host(self):
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.1)

    def kill(self, index):
        """An agent and its worker at once, as a host that loses its power."""
        for pid in [*workers(self.running[index].pid), self.running[index].pid]:
            os.kill(pid, signal.SIGKILL)
        self.running[index].wait()

    def told(self):
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("agent_*.txt")))


def workers(pid):
    listed = subprocess.run(["pgrep", "-P", str(pid)], check=False, capture_output=True, text=True)
    return [int(child) for child in listed.stdout.split()]


@pytest.fixture
def agents(tmp_path):
    made = []

    def make(stage):
        made.append(Agents(tmp_path, stage))
        return made[0]

    yield make
    for one in made:
        for process in one.running:
            for pid in [*workers(process.pid), process.pid] if process.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            process.wait()


def history(folder):
    """What ranks have noted: samples by step, start of the job, and its number of ranks."""
    found = defaultdict(list)
    for path in folder.glob("samples_*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # its writer was not killed in the middle of it
                entry = json.loads(line)
                found[entry["step"], entry["start"], entry["size"]] += entry["samples"]
    return found


def wait_until(agents, step, size):
    """Wait until that many ranks take part in such a step."""
    deadline = time.monotonic() + 90
    while not any(at >= step and of == size for at, _, of in history(agents.folder)):
        assert time.monotonic() < deadline, agents.told()
        time.sleep(0.1)


def reference():
    """The samples of each step, and the weights at the end, of plain training on whole batches."""
    model, samples = build(Net), Numbered()
    optimizer, order = adamw(model), DistributedSampler(samples, num_replicas=1, rank=0)
    batches = []
    for step in range(NUM_STEPS):
        epoch, place = divmod(step * BATCH, NUM_SAMPLES)
        order.set_epoch(epoch)
        batches.append(list(order)[place : place + BATCH])
        loss_of(model, default_collate([samples[number] for number in batches[-1]])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return batches, {f"module.{name}": value for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_of_2_then_1_then_4_ranks_repeats_and_skips_nothing(stage, agents):
    job = agents(stage)
    job.start()
    job.wait_for_host()  # the one where agents meet, which stays
    job.start()
    wait_until(job, 3, size=2)
    job.kill(1)
    wait_until(job, 6, size=1)
    for _ in range(3):
        job.start()
    wait_until(job, 9, size=4)
    os.kill(workers(job.running[2].pid)[0], signal.SIGKILL)
    for index in (0, 2, 3, 4):
        assert job.running[index].wait(timeout=120) == 0, job.told()
    batches, weights = reference()
    last = {step: samples for (step, _, _), samples in sorted(history(job.folder).items())}  # the try that counts
    assert [sorted(last[step]) for step in range(NUM_STEPS)] == [sorted(batch) for batch in batches]
    torch.testing.assert_close(torch.load(job.folder / "final.pt"), weights, rtol=1e-9, atol=1e-11)
