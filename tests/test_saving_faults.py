"""Checkpoints interrupted, damaged or in each other's way: the last complete one loads, or an error says why."""

import functools
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from reference import Net, build, engine_of, fit, values
from zerofunc.saving import checkpoints, folders, pieces
from zerofunc.saving.manifest import CheckpointError
from zerofunc_testing.pool import RankError, RankPool

IS_ROOT = os.geteuid() == 0


def trained(steps, stage=3):
    engine = engine_of(build(Net), stage, zerofunc={"timeout_s": 10})
    for step in range(steps):
        engine.backward(fit(engine, step, 0))
        engine.step()
    return engine


def expected(steps):
    """The state that two ranks with the same data come to, in one process."""
    return values(trained(steps, stage=0).module)


# ---- killed ----------------------------------------------------------------------------------------------------------

POINTS = {
    "during forward": (torch.Tensor, "tanh"),
    "before anything is written": (folders, "begin"),
    "before files are written": (pieces, "write_share"),
    "between two files": (pieces, "write_tensors"),
    "before the table is written": (checkpoints, "write_manifest"),
    "before the renaming": (folders, "commit"),
    "between the renamings": (Path, "rename"),
    "before latest is written": (folders, "write_bytes"),
    "before the replaced one is removed": (shutil, "rmtree"),
    "during load": (pieces, "read_pieces"),
}
OF_FIRST_RANK = {
    "before anything is written", "before the table is written", "before the renaming", "between the renamings",
    "before latest is written", "before the replaced one is removed",
}  # fmt: skip
IS_COMPLETE = {"before latest is written", "before the replaced one is removed", "during load"}
FAST = {("before files are written", "rank 1"), ("between the renamings", "rank 0")}
VICTIMS = {"rank 0": {0}, "rank 1": {1}, "all": {0, 1}}
CASES = [
    pytest.param(point, victim, id=f"{point}, {victim}", marks=[] if (point, victim) in FAST else pytest.mark.faults)
    for point in POINTS
    for victim in VICTIMS
    if point not in OF_FIRST_RANK or victim != "rank 1"
]


def killed_at(folder, point, victims):
    engine = trained(1)
    engine.save_checkpoint(folder, "a")
    engine.save_checkpoint(folder, "b")
    engine.backward(fit(engine, 1, 0))
    engine.step()
    if dist.get_rank() in victims:
        owner, name = POINTS[point]
        original = getattr(owner, name)
        calls = 1 if point != "between the renamings" else 2  # the second renaming gives the new one its name

        def kill(*args, **kwargs):
            nonlocal calls
            calls -= 1
            if not calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, kill)
    if point == "during forward":
        torch.tanh = torch.Tensor.tanh
        engine.backward(fit(engine, 2, 0))
    engine.save_checkpoint(folder, "b")
    if point == "during load":
        engine.load_checkpoint(folder)


def resumed(folder):
    engine = trained(0)
    path, _ = engine.load_checkpoint(folder)
    found = values(engine.module), Path(path).name, engine.global_steps
    engine.save_checkpoint(folder, "c")
    engine.destroy()
    dist.barrier()
    return *found, sorted(p.name for p in Path(folder).iterdir())


@pytest.mark.parametrize(("point", "victim"), CASES)
def test_a_killed_run_goes_on_from_the_last_complete_checkpoint(point, victim, tmp_path):
    with RankPool(2, timeout_s=60, grace_s=15) as pool:
        with pytest.raises(RankError, match="SIGKILL"):
            pool.run(functools.partial(killed_at, tmp_path, point, VICTIMS[victim]))
        for state, tag, steps, names in pool.run(functools.partial(resumed, tmp_path)):
            assert steps == (2 if point in IS_COMPLETE else 1)
            assert tag.removeprefix(".replaced-") == "b"
            torch.testing.assert_close(state, expected(steps), rtol=1e-9, atol=1e-12)
            assert names == [".lock", "a", "b", "c", "latest"]


# ---- damaged ---------------------------------------------------------------------------------------------------------


def damage(folder, rng):
    """One file cut off, or with one bit changed; what was done."""
    path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"))
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    if rng.random() < 0.3:
        path.write_bytes(content[:place])
        return f"{path.name} cut at {place}"
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"{path.name} changed at {place}"


def test_200_damaged_checkpoints_are_refused_and_change_nothing(tmp_path):
    engine = trained(2)
    engine.save_checkpoint(tmp_path / "whole", client_state={"text": "x" * 50, "tensor": torch.ones(20)})
    victim = engine_of(build(Net, seed=1), 3)
    before = values(victim.module)
    rng, refused = random.Random(0), 0
    for _ in range(200):
        shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        done = damage(tmp_path / "damaged", rng)
        with pytest.raises(CheckpointError) as caught:
            victim.load_checkpoint(tmp_path / "damaged")
            pytest.fail(f"loaded although {done}")
        refused += 1
        assert any(name in str(caught.value) for name in (done.split()[0], "has no checkpoint")), (done, caught.value)
        torch.testing.assert_close(values(victim.module), before, rtol=0, atol=0)
        assert victim.global_steps == 0 and not victim.optimizer.state
        shutil.rmtree(tmp_path / "damaged")
    assert refused == 200
    victim.load_checkpoint(tmp_path / "whole")
    torch.testing.assert_close(values(victim.module), values(engine.module), rtol=0, atol=0)


def test_missing_foreign_and_newer_files_are_named(tmp_path):
    engine = trained(1)
    engine.save_checkpoint(tmp_path, "a")
    (tmp_path / "a" / "data_00000.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError, match=r"data_00000.safetensors is missing .* load another checkpoint, by its tag"
    ):
        engine.load_checkpoint(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "a" / "data_00000.safetensors")
    table = tmp_path / "a" / "checkpoint.json"
    table.write_text(table.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(
        CheckpointError, match=r"written in format 99 by zerofunc .* install that version or a newer one"
    ):
        engine.load_checkpoint(tmp_path)
    table.unlink()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of zerofunc: it has no checkpoint.json"):
        engine.load_checkpoint(tmp_path)


# ---- disks that refuse -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        not IS_ROOT
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def filled(folder):
    engine = trained(1)
    engine.save_checkpoint(folder, "a")
    train_on = fit(engine, 1, 0)
    engine.backward(train_on)
    engine.step()
    ballast = Path(folder) / "ballast"
    if dist.get_rank() == 0:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        ballast.write_bytes(b"0" * max(free - 12000, 0))
    dist.barrier()
    with pytest.raises(CheckpointError, match="No space left on device"):
        engine.save_checkpoint(folder, "b")
    dist.barrier()
    names = sorted(path.name for path in Path(folder).iterdir())
    assert names == [".lock", "a", "ballast", "latest"], names
    again = trained(0)
    again.load_checkpoint(folder)
    assert again.global_steps == 1
    if dist.get_rank() == 0:
        ballast.unlink()
    dist.barrier()
    engine.save_checkpoint(folder, "b")
    again.load_checkpoint(folder)
    torch.testing.assert_close(values(again.module), values(engine.module), rtol=0, atol=0)


def test_a_full_disk_leaves_the_last_checkpoint(small_disk):
    with RankPool(2) as pool:
        pool.run(functools.partial(filled, small_disk))


@pytest.mark.world_size(2)
def test_a_folder_that_cannot_be_written_is_named_on_every_rank(tmp_path):
    engine = trained(0)
    (tmp_path / "file").write_text("")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank 0: .*file"):
        engine.save_checkpoint(tmp_path / "file")
    if IS_ROOT:
        os.seteuid(65534)
    try:
        os.chmod(tmp_path, 0o500) if not IS_ROOT else None
        with pytest.raises(CheckpointError, match=r"rank 0: .*Permission denied"):
            engine.save_checkpoint(tmp_path / "new")
    finally:
        os.seteuid(0) if IS_ROOT else os.chmod(tmp_path, 0o700)


# ---- two jobs --------------------------------------------------------------------------------------------------------

held = []


def save_and_stay(folder):
    held.append(trained(1))
    held[0].save_checkpoint(folder, "of the first job")
    return os.getpid()


def save_too(folder):
    trained(0).save_checkpoint(folder, "of the second job")


def test_two_jobs_cannot_save_into_one_folder(tmp_path):
    with RankPool(1) as first, RankPool(2) as second:
        (pid,) = first.run(functools.partial(save_and_stay, tmp_path))
        with pytest.raises(RankError, match=f"is being saved into by process {pid} of "):
            second.run(functools.partial(save_too, tmp_path))
        assert (tmp_path / folders.LATEST).read_text() == "of the first job"
        os.kill(pid, signal.SIGKILL)
        second.run(functools.partial(save_too, tmp_path))
    assert (tmp_path / folders.LATEST).read_text() == "of the second job"


# ---- ended -----------------------------------------------------------------------------------------------------------


def ended(folder):
    engine = trained(1)
    engine.save_on_exit(folder)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    engine.backward(fit(engine, 1, 0))
    with pytest.raises(SystemExit) as caught:
        engine.step()
    assert caught.value.code == 143
    again = trained(0)
    again.load_checkpoint(folder)
    assert again.global_steps == 2
    torch.testing.assert_close(values(again.module), values(engine.module), rtol=0, atol=0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_sigterm_to_one_rank_saves_and_ends_all(tmp_path):
    with RankPool(2) as pool:
        pool.run(functools.partial(ended, tmp_path))
