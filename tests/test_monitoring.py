"""What a run tells of itself: scalars through the real libraries, progress lines, times of phases, its log."""

import csv
import importlib.machinery
import logging
import math
import time
from contextlib import contextmanager

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import zerofunc
import zerofunc.training.progress
from reference import Net, build, data
from zerofunc.config import load_config
from zerofunc.module.sharding import sharding_of, usage
from zerofunc.training.monitoring import Monitor, _is_installed
from zerofunc.training.progress import Progress, RankFilter, Step, Timers, log_state, log_to_console, page_table

CPU = torch.device("cpu")
EVENTS = [("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", 2.25, 8)]
LATER = [("Train/Samples/lr", 0.25, 16), ("Train/Samples/train_loss", math.nan, 16)]


def settings(**sections):
    return load_config({"train_batch_size": 4, **sections}, 1)


# ---- monitors ----------------------------------------------------------------------------------------------------


def test_csv_files_hold_a_line_per_event_and_one_header(tmp_path):
    config = settings(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    for events in (EVENTS, LATER):  # the second run resumes the first
        monitor = Monitor(config, 0)
        monitor.write(iter(events))
        monitor.close()
    with open(tmp_path / "run" / "Train_Samples_lr.csv", newline="") as file:
        assert list(csv.reader(file)) == [["step", "lr"], ["8", "0.5"], ["16", "0.25"]]
    assert (tmp_path / "run" / "Train_Samples_train_loss.csv").read_text().splitlines()[-1] == "16,nan"


def test_tensorboard_shows_what_was_written_before_it_is_closed(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = Monitor(settings(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "run"}), 0)
    monitor.write(EVENTS)
    monitor.write(LATER)
    read = accumulators.EventAccumulator(str(tmp_path / "run")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("Train/Samples/lr")] == [(8, 0.5), (16, 0.25)]
    assert math.isnan(read.Scalars("Train/Samples/train_loss")[1].value)
    monitor.close()


def wandb_records(folder):
    """The records of an offline run, as wandb's own protocol buffers; its file is a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert len(content) < 1 << 15  # one block, so that no record is split
    start = 7
    while start + 7 <= len(content):
        length = int.from_bytes(content[start + 4 : start + 6], "little")
        yield Record.FromString(content[start + 7 : start + 7 + length])
        start += 7 + length


def test_wandb_logs_events_of_one_step_together(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in [("MODE", "offline"), ("SILENT", "true"), ("DIR", str(tmp_path)), ("_DISABLE_STATS", "true")]:
        monkeypatch.setenv(f"WANDB_{name}", value)
    monitor = Monitor(settings(wandb={"enabled": True, "project": "digits", "group": "first"}), 0)
    monitor.write(EVENTS)
    monitor.write(LATER)
    monitor.close()
    deadline = time.monotonic() + 20
    runs = []
    while not runs and time.monotonic() < deadline:  # wandb's own process writes the file, later on a busy machine
        records = list(wandb_records(tmp_path))
        runs = [record.run for record in records if record.HasField("run")]
    assert {(run.project, run.run_group) for run in runs} == {("digits", "first")}
    rows = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records if record.HasField("history")
    ]  # fmt: skip
    assert [(row["_step"], row["Train/Samples/lr"]) for row in rows] == [("8", "0.5"), ("16", "0.25")]
    assert [row["Train/Samples/train_loss"] for row in rows] == ["2.25", "NaN"]


def test_other_ranks_and_disabled_sections_write_nothing(tmp_path):
    csv_monitor = {"enabled": True, "output_path": str(tmp_path)}
    for config, rank in [(settings(csv_monitor=csv_monitor), 1), (settings(csv_monitor={"enabled": False}), 0)]:
        monitor = Monitor(config, rank)
        monitor.write(EVENTS)
        monitor.close()
        assert monitor.enabled == (rank == 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_absent_library_is_an_error_on_every_rank(monkeypatch, rank):
    monkeypatch.setattr("zerofunc.training.monitoring.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"enables tensorboard and wandb, .* pip install 'zerofunc\[monitor\]'"):
        Monitor(settings(tensorboard={"enabled": True}, wandb={"enabled": True}), rank)


def test_a_folder_is_not_a_library(tmp_path, monkeypatch):
    (tmp_path / "wandb_of_an_earlier_run").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.machinery.PathFinder.find_spec("wandb_of_an_earlier_run") is not None
    assert not _is_installed("wandb_of_an_earlier_run")


# ---- progress ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets; each reading moves it by a thousandth of a second where it says so."""

    class Clock:
        now, tick = 100.0, 0.0

        def perf_counter(self):
            self.now += self.tick
            return self.now

    made = Clock()
    monkeypatch.setattr(zerofunc.training.progress, "time", made)
    return made


def step_of(number, **more):
    known = {"lr": [0.5, 0.1], "momentum": [(0.9, 0.99)], "grad_norm": torch.tensor(3.0), **more}
    return Step(number, number // 2, 4 * number, 4, **known)


def no_usage():
    raise AssertionError("memory was asked for")


def run_steps(config, clock, num_steps, rank=0):
    """Steps of two losses each; the forward takes a millisecond, the rest of a second passes afterwards."""
    progress = Progress(config, rank, CPU)
    for number in range(1, num_steps + 1):
        clock.tick = 1e-3
        with progress.timers.phase("forward"):
            pass
        clock.tick = 0.0
        for loss in (0.25, 0.5):
            progress.add_loss(torch.tensor(loss * number))
        clock.now += 1.0
        progress.finish_step(step_of(number), no_usage)
    progress.close()


def test_a_progress_line_every_few_steps(clock, caplog):
    caplog.set_level(logging.INFO, "zerofunc")
    run_steps(settings(steps_per_print=2), clock, 5)
    lines = [record.getMessage() for record in caplog.records if record.name == "zerofunc.training.progress"]
    assert lines == [
        "step=2, skipped=1, lr=[0.5, 0.1], mom=[(0.9, 0.99)], loss=1.5, samples/s=4",
        "step=4, skipped=2, lr=[0.5, 0.1], mom=[(0.9, 0.99)], loss=3, samples/s=4",
    ]


def test_a_breakdown_has_times_per_step(clock, caplog, tmp_path):
    caplog.set_level(logging.INFO, "zerofunc")
    csv_monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    run_steps(settings(steps_per_print=3, wall_clock_breakdown=True, csv_monitor=csv_monitor), clock, 3)
    assert caplog.messages[-1].endswith("samples/s=3.992, forward=1 ms")
    written = {file.stem: file.read_text().split() for file in (tmp_path / "run").iterdir()}
    assert sorted(written) == [
        f"Train_Samples_{name}" for name in ("elapsed_time_ms_forward", "grad_norm", "lr", "train_loss")
    ]
    assert written["Train_Samples_train_loss"] == ["step,train_loss", "4,0.75", "8,1.5", "12,2.25"]
    times = [float(row.partition(",")[2]) for row in written["Train_Samples_elapsed_time_ms_forward"][1:]]
    assert times == pytest.approx([1.0, 1.0, 1.0])


def test_the_loss_scale_is_written_where_there_is_one():
    names = [
        name for name, _, _ in zerofunc.training.progress.scalars(step_of(1, loss_scale=8.0, grad_norm=None), None, {})
    ]
    assert names == ["Train/Samples/lr", "Train/Samples/loss_scale"]


def test_a_breakdown_that_nobody_would_see_is_off_and_says_so(caplog):
    assert not Progress(settings(wall_clock_breakdown=True), 0, CPU).timers.enabled
    assert "wall_clock_breakdown needs steps_per_print or a monitor" in caplog.text


def test_other_ranks_report_nothing(clock, caplog):
    caplog.set_level(logging.INFO, "zerofunc")
    run_steps(settings(steps_per_print=1, wall_clock_breakdown=True), clock, 2, rank=1)
    assert caplog.messages == []


def test_memory_and_state_are_logged_where_asked_for(caplog):
    caplog.set_level(logging.INFO, "zerofunc")
    module = zerofunc.shard(build(Net), 3, page_bytes=160)
    config = settings(steps_per_print=1, memory_breakdown=True)
    Progress(config, 0, CPU).finish_step(step_of(1), lambda: usage(module))
    assert "held=0.0 MB, gathered=0.0 MB, gathered_peak=0.0 MB" in caplog.messages[-1]
    log_state(config, sharding_of(module).pages)
    assert '"steps_per_print": 1' in caplog.text
    assert page_table(sharding_of(module).pages).splitlines()[:2] == [
        "page  dtype     elements  per rank  parameters",
        "   0  float64         24        24  first.weight",
    ]


# ---- phases ------------------------------------------------------------------------------------------------------


class Timed(torch.nn.Module):
    """A network whose forward is a phase, as an engine's is."""

    def __init__(self, net, timers):
        super().__init__()
        self.net, self.timers = net, timers

    def forward(self, x):
        with self.timers.phase("forward"):
            return self.net(x).square().sum()


X, BATCH = data(0, 0, 4), data(1, 0, 3, 4)
TRANSFORMS = {
    "grad": lambda f: grad(f)(X),
    "vjp": lambda f: vjp(f, X)[1](torch.ones((), dtype=X.dtype)),
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "jacrev": lambda f: jacrev(f)(X),
    "jacfwd": lambda f: jacfwd(f)(X),
    "hessian": lambda f: hessian(f)(X),
    "vmap": lambda f: vmap(f)(BATCH),
    "vmap of grad": lambda f: vmap(grad(f))(BATCH),
    "vmap of hessian": lambda f: vmap(hessian(f))(BATCH),
    "linearize": lambda f: linearize(f, X)[1](X),
    "compile": lambda f: torch.compile(f, backend="eager")(X),
}


@pytest.mark.parametrize(
    "transform", [pytest.param(name, marks=[pytest.mark.slow] if name == "compile" else []) for name in TRANSFORMS]
)
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
def test_a_timed_forward_transforms_as_an_untimed_one(transform, enabled):
    timers = Timers(CPU, enabled)
    net = zerofunc.shard(build(Net), 3, page_bytes=160, resident_bytes=0)
    found = TRANSFORMS[transform](Timed(net, timers))
    torch.testing.assert_close(found, TRANSFORMS[transform](Timed(build(Net), Timers(CPU, False))))
    assert list(timers.take()) == (["forward"] if enabled and transform != "compile" else [])


def test_an_untimed_forward_leaves_no_trace_in_a_graph():
    traced = make_fx(Timed(build(Net), Timers(CPU, False)))(X)
    assert "record_function" not in traced.code


def test_the_profiler_shows_phases_that_are_not_timed():
    timers = Timers(CPU, False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with timers.phase("backward"), timers.phase("reduce"):
            torch.ones(2).sum()
    assert {"zerofunc.backward", "zerofunc.reduce"} <= {event.key for event in profile.key_averages()}
    assert timers.take() == {}


def test_a_phase_that_fails_counts_and_raises(clock):
    timers = Timers(CPU, True)
    clock.tick = 1e-3
    with pytest.raises(ZeroDivisionError), timers.phase("step"):
        clock.now += 1 / 0
    with timers.phase("step"), timers.phase("reduce"):
        pass
    assert timers.take() == pytest.approx({"reduce": 1.0, "step": 4.0})
    assert timers.take() == {}


# ---- the log -----------------------------------------------------------------------------------------------------


@contextmanager
def bare_log():
    """zerofunc's logger as in a program that has not set up logging; pytest's own handlers are put aside."""
    logger = logging.getLogger("zerofunc")
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [], False
    try:
        yield logger
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])


def test_the_console_shows_each_line_once_with_its_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with bare_log():
        log_to_console("debug")
        log_to_console("info")
        logging.getLogger("zerofunc.training.engine").info("hello")
        logging.getLogger("zerofunc.training.engine").debug("not this")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("[INFO] [rank 3] hello")


def test_handlers_of_the_user_are_enough():
    with bare_log() as logger:
        logger.addHandler(mine := logging.StreamHandler())
        log_to_console(logging.INFO)
        assert logger.handlers == [mine]


@pytest.mark.world_size(2)
def test_records_have_the_rank_of_the_process_group():
    record = logging.LogRecord("zerofunc", logging.INFO, "", 0, "", (), None)
    assert RankFilter().filter(record) and record.rank == torch.distributed.get_rank()
