"""The rank pool: results, failures of every kind, leaks, progress, and the marker."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from zerofunc_testing.pool import RankError, RankPool, report, shared_pool

pytest_plugins = ["pytester"]


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, grace_s=1) as pool:
        yield pool


def sum_of_ranks(factor):
    tensor = torch.tensor([factor * (dist.get_rank() + 1.0)], dtype=torch.float64)
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor


def test_results_come_in_rank_order(pool):
    for rank, (found, total) in enumerate(pool.run(sum_of_ranks, 2.0)):
        assert found == rank
        assert total.item() == 6.0


def test_processes_are_kept(pool):
    assert pool.run(os.getpid) == pool.run(os.getpid)


def draw():
    return torch.rand(3)


def test_every_run_is_seeded(pool):
    first, second = pool.run(draw), pool.run(draw)
    assert all(torch.equal(tensor, first[0]) for tensor in first + second)


def raise_on_one_rank(guilty):
    if dist.get_rank() == guilty:
        raise ValueError("a bad value")
    dist.barrier()


def test_exception_on_one_rank_shows_both(pool):
    with pytest.raises(RankError, match="raise_on_one_rank failed on ranks 0, 1 of 2") as caught:
        pool.run(raise_on_one_rank, 1)
    assert list(caught.value.failures) == [1, 0]
    assert 'raise ValueError("a bad value")' in caught.value.failures[1]
    assert "was still running 1 s after the first failure" in caught.value.failures[0]
    assert "raise_on_one_rank" in caught.value.failures[0]


def test_pool_works_again_after_a_failure(pool):
    before = pool.run(os.getpid)
    with pytest.raises(RankError):
        pool.run(raise_on_one_rank, 0)
    assert not set(before) & set(pool.run(os.getpid))


def spin_on_one_rank(guilty):
    while dist.get_rank() == guilty:
        pass


def test_hang_on_one_rank_ends_with_its_stack(pool):
    pool.run(os.getpid)
    start = time.monotonic()
    with pytest.raises(RankError, match="failed on rank 1 of 2") as caught:
        pool.run(spin_on_one_rank, 1, timeout_s=1)
    assert time.monotonic() - start < 5
    assert "was still running after 1 s" in caught.value.failures[1]
    assert "in spin_on_one_rank" in caught.value.failures[1]


def kill_one_rank(guilty, number):
    if dist.get_rank() == guilty:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_death_of_a_rank_is_named(pool, number):
    with pytest.raises(RankError, match=f"rank 1 died of {number.name}") as caught:
        pool.run(kill_one_rank, 1, number)
    assert next(iter(caught.value.failures)) == 1
    if number == signal.SIGSEGV:
        assert "in kill_one_rank" in caught.value.failures[1]


def exit_quietly():
    os._exit(3)


def test_exit_of_a_rank_is_named(pool):
    with pytest.raises(RankError, match="rank 0 ended with exit code 3"):
        pool.run(exit_quietly)


def leak(what):
    if what == "default dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "grad mode":
        torch.set_grad_enabled(False)
    elif what == "autocast on cpu":
        torch.set_autocast_enabled("cpu", True)
    elif what == "deterministic algorithms":
        torch._C._set_deterministic_algorithms(True)  # the public function imports the compiler first: seconds
    else:
        os.environ["LEFT_BEHIND"] = "1"


@pytest.mark.parametrize(
    "what",
    ["default dtype", "grad mode", "autocast on cpu", "deterministic algorithms", "environment variable LEFT_BEHIND"],
)
def test_leaked_state_fails_and_is_named(pool, what):
    with pytest.raises(RankError, match=f"rank 0 left global state changed: {what}"):
        pool.run(leak, what)
    assert pool.run(torch.get_default_dtype)[0] == torch.float32


def count_to(limit):
    for step in range(limit):
        report({"step": step})


def test_progress_arrives_in_order(pool):
    seen = {0: [], 1: []}
    pool.run(count_to, 3, on_progress=lambda rank, message: seen[rank].append(message["step"]))
    assert seen == {0: [0, 1, 2], 1: [0, 1, 2]}
    pool.run(count_to, 3)
    count_to(3)


def test_an_interrupt_in_the_parent_restarts_the_pool(pool):
    def interrupt(rank, message):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(count_to, 3, on_progress=interrupt)
    assert len(pool.run(os.getpid)) == 2


def return_what_cannot_be_pickled():
    return open(os.devnull)


def test_what_cannot_be_pickled_is_refused(pool):
    with pytest.raises(TypeError, match="top level"):
        pool.run(lambda: None)
    with pytest.raises(TypeError, match="must be picklable"):
        pool.run(torch.sum, (value for value in range(3)))
    with pytest.raises(RankError, match="cannot pickle"):
        pool.run(return_what_cannot_be_pickled)


def make_a_pool():
    RankPool(1)


def test_ranks_start_no_pools(pool):
    with pytest.raises(RankError, match="__main__"):
        pool.run(make_a_pool)


def test_world_size_must_be_positive():
    with pytest.raises(ValueError, match="at least 1, found 0"):
        RankPool(0)


def test_world_of_one_is_a_real_group():
    assert shared_pool(1).run(sum_of_ranks, 1.0)[0][1].item() == 1.0


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_marked_body_runs_on_ranks(scale, world_size, tmp_path):
    assert dist.get_world_size() == world_size == int(os.environ["WORLD_SIZE"])
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size
    tensor = torch.full((), scale)
    dist.all_reduce(tensor)
    assert tensor.item() == scale * world_size


SCRIPT = """
    import torch.distributed as dist
    from dataclasses import dataclass
    from zerofunc_testing.pool import RankPool

    @dataclass
    class Square:
        value: int

    def square(of):
        return Square(of.value * (dist.get_rank() + 1) ** 2)

    {guard}
    with RankPool(2) as pool:
        print([result.value for result in pool.run(square, Square(3))])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["path", "module"])
def test_a_scripts_own_functions_run(tmp_path, how):
    text = textwrap.dedent(SCRIPT).format(guard='if __name__ == "__main__":').replace("\nwith", "\n  with")
    (tmp_path / "script.py").write_text(text.replace("\n    print", "\n      print"))
    run = subprocess.run(
        [sys.executable, *(["script.py"] if how == "path" else ["-m", "script"])],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.stdout == "[3, 12]\n", run.stderr


@pytest.mark.slow
def test_a_script_without_guard_is_told(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).format(guard=""))
    run = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert 'put its last lines under `if __name__ == "__main__":`' in run.stderr


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


MARKED = """
    import pytest
    import torch.distributed as dist

    class Local:
        pass

    @pytest.mark.world_size(2)
    def test_assertion():
        rank = dist.get_rank()
        assert rank == 0

    @pytest.mark.world_size(2)
    def test_skip():
        pytest.skip("not here")

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("local", [Local])
    def test_argument_of_the_module(local):
        assert local is Local

    @pytest.mark.world_size(2)
    def test_argument_that_cannot_travel(capsys):
        pass
"""


@pytest.mark.parametrize("mode", ["prepend", pytest.param("importlib", marks=pytest.mark.slow)])
def test_marker_reports_outcomes(pytester, monkeypatch, mode):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    pytester.makepyfile(test_marked=textwrap.dedent(MARKED))
    result = pytester.runpytest_subprocess("-p", "zerofunc_testing.pytest_plugin", f"--import-mode={mode}")
    result.assert_outcomes(passed=1, failed=2, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            "*test_assertion failed on rank 1 of 2",
            "*assert 1 == 0",
            "*the argument 'capsys' of a test marked world_size must be picklable*",
        ]
    )


def test_marker_without_sizes_is_refused(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.world_size('two')\ndef test_no_size(): pass")
    result = pytester.runpytest_inprocess("-p", "zerofunc_testing.pytest_plugin")
    result.stdout.fnmatch_lines(["*world_size takes positive integers*"])
