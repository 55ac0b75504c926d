"""`zerofunc verify` as a user calls it, on models of their own."""

import json
import os
import signal

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from zerofunc.pages.paged_tensor import PagedTensor
from zerofunc.tools.cli import app
from zerofunc.verify.cells import CELLS


class Scaled(nn.Module):
    """One linear layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        return torch.tanh(x @ self.weight.t())


class WrongWhenSharded(Scaled):
    """Gives other numbers where its weight is sharded, as a faulty engine would."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-6 * isinstance(self.weight, PagedTensor))


class CrashesUnderGrad(Scaled):
    """Kills its rank where it is differentiated by functorch while sharded."""

    def forward(self, x):
        if isinstance(self.weight, PagedTensor) and torch._C._functorch.peek_interpreter_stack() is not None:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(x)


def scaled():
    return Scaled(), torch.randn(2, 3)


def wrong_when_sharded():
    return WrongWhenSharded(), torch.randn(2, 3)


def not_a_factory():
    return torch.randn(2, 3)


def verify(tmp_path, model, *options):
    file = tmp_path / "outcomes.json"
    result = CliRunner().invoke(app, ["verify", "--model", model, "--json", str(file), *options])
    return result, json.loads(file.read_text()) if file.exists() else None


def test_the_table_of_ones_own_model_is_ok(tmp_path, monkeypatch):
    cells = [cell for cell in CELLS if cell.models is None and cell.name != "linearize"]
    monkeypatch.setattr("zerofunc.tools.cli.CELLS", cells)
    result, outcomes = verify(tmp_path, f"{__name__}:scaled", "--stages", "0,3", "--nproc", "1")
    assert "Buffers, such as BatchNorm's statistics, are each rank's own" in " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    assert {(outcome["stage"], outcome["status"]) for outcome in outcomes} == {(0, "ok"), (3, "ok")}
    assert len(outcomes) == 2 * len(cells)
    assert "over inputs" in result.output


def test_a_wrong_number_is_shown_and_ends_in_exit_code_1(tmp_path, monkeypatch):
    names = {"forward", "grad", "jvp", "ordinary loss"}
    monkeypatch.setattr("zerofunc.tools.cli.CELLS", [cell for cell in CELLS if cell.name in names])
    result, outcomes = verify(tmp_path, f"{__name__}:wrong_when_sharded", "--stages", "2,3", "--nproc", "1")
    assert result.exit_code == 1
    assert {outcome["status"] for outcome in outcomes if outcome["stage"] == 2} == {"ok"}
    wrong = {outcome["cell"] for outcome in outcomes if outcome["stage"] == 3 and outcome["status"] == "wrong"}
    assert wrong == names
    assert "differs by" in result.output


def test_a_crash_costs_its_cell_and_not_the_table(monkeypatch):
    """Two cells, of which one kills its rank."""
    from rich.console import Console

    from zerofunc.tools import cli

    monkeypatch.setattr(cli, "CELLS", [cell for cell in CELLS if cell.name in ("forward", "grad", "ordinary loss")])
    setting = cli.Setting(f"{__name__}:crashes_under_grad")
    outcomes = cli.run_table(setting, [3], 1, Console(quiet=True))
    assert [outcome.status for outcome in outcomes] == ["ok", "error", "ok"]
    assert "SIGSEGV" in outcomes[1].detail


def crashes_under_grad():
    return CrashesUnderGrad(), torch.randn(2, 3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nowhere:model", "package.module:factory"),
        (f"{__name__}:absent", "package.module:factory"),
        (f"{__name__}:not_a_factory", "must return (module, example input)"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused(tmp_path, model, words):
    result, outcomes = verify(tmp_path, model)
    assert result.exit_code == 2
    assert outcomes is None
    assert words in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("stages", ["4", "a", ""])
def test_stages_are_checked(tmp_path, stages):
    assert verify(tmp_path, "mlp", "--stages", stages)[0].exit_code == 2
