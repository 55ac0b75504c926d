"""The table of transforms at every stage: each cell equals plain PyTorch, cold, warm, and training goes on right."""

import os
import random

import pytest
import torch

from reference import STAGES
from zerofunc.verify.cells import CELLS
from zerofunc.verify.models import Attention
from zerofunc.verify.run import CANNOT, OK, Setting, plain_fails, verify_rank

# Fresh weights and inputs in every session; a failure prints the setting with its seed.
SEED = int(os.environ.setdefault("ZEROFUNC_TEST_SEED", str(random.randrange(10**6))))

# What PyTorch 2.13 itself cannot do with these models.
NOT_IN_PYTORCH = {
    "attention": set(),
    "conv": set(),
    "gpt2": {"linearize", "jvp by forward_ad", "shards: vmap(grad) over an ensemble"},
    "llama": {"linearize", "jvp by forward_ad"},
    "lstm": {
        "linearize", "vmap", "vmap(grad)", "vmap(jacrev)", "vmap(hessian)", "vmap(jvp(grad))",
        "functional_call: per-sample grad", "Laplacian (vmap of hessian)", "forces + energy",
        "Hutchinson trace (jvp of grad)", "Jacobian (vmap of jacrev)", "checkpoint: vmap(grad)",
        "checkpoint: functional_call: per-sample grad",
    },
    "mlp": set(),
    "shared": set(),
}  # fmt: skip


def check(model, stage, cells, **options):
    setting = Setting(f"zerofunc.verify.models:{model}", seed=SEED, **options)
    assert cells <= {cell.name for cell in CELLS}
    outcomes = verify_rank(setting, stage, [cell.name for cell in CELLS if cell.name in cells])
    assert [outcome for outcome in outcomes if outcome.status not in (OK, CANNOT)] == [], setting
    assert {outcome.cell for outcome in outcomes if outcome.status == CANNOT} <= NOT_IN_PYTORCH[model], setting


OF_ANY_MODEL = {cell.name for cell in CELLS if cell.models is None}
KERNELS = {cell.name for cell in CELLS if cell.models is not None}
LONG = {"linearize"}  # takes as long as all others together
# One of each kind that goes through other code. The slow tests have every transform for every model.
SPREAD = {
    "grad", "jvp", "vmap(grad)", "grad(grad)", "functional_call: per-sample grad", "autograd gradient penalty + loss",
    "func.grad penalty alone", "backward through a jvp", "shards: grad(jvp)", "checkpoint: jvp",
}  # fmt: skip
FEW = {"jvp", "grad(grad)", "backward through a jvp"}


@pytest.mark.world_size(2)
@STAGES
def test_every_transform_equals_plain_pytorch(stage):
    check("mlp", stage, OF_ANY_MODEL if stage == 3 else OF_ANY_MODEL - LONG)


@pytest.mark.world_size(1)
def test_every_transform_on_one_rank_equals_plain_pytorch():
    check("mlp", 3, OF_ANY_MODEL - LONG)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [3])
def test_fused_kernels_give_way_to_ones_that_have_the_derivative(stage):
    check("mlp", stage, KERNELS)  # which bring a model of their own


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("model", ["attention", "conv", "lstm", "shared"])
def test_other_architectures_equal_plain_pytorch(model, stage):
    check(model, stage, SPREAD)


@pytest.mark.world_size(2)
def test_a_language_model_of_transformers_equals_plain_pytorch():
    check("gpt2", 3, FEW)


@pytest.mark.world_size(1)
@pytest.mark.parametrize("model", ["conv", "lstm", "shared", "llama"])
def test_other_architectures_on_one_rank_equal_plain_pytorch(model):
    check(model, 3, FEW)


@pytest.mark.slow
@pytest.mark.world_size(1, 2)
@STAGES
def test_every_kernel_gives_way_to_one_that_has_the_derivative(stage):
    check("mlp", stage, KERNELS)


@pytest.mark.slow
@pytest.mark.world_size(1, 2, timeout_s=600)
@STAGES
@pytest.mark.parametrize("model", ["mlp", "attention", "conv", "lstm", "shared", "gpt2", "llama"])
def test_every_transform_of_every_architecture_equals_plain_pytorch(model, stage):
    check(model, stage, OF_ANY_MODEL)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_four_ranks_equal_plain_pytorch(stage):
    check("mlp", stage, SPREAD)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_many_resident_pages_and_prefetch_change_nothing():
    check("attention", 3, SPREAD, resident_bytes=3000)
    check("attention", 3, FEW, resident_bytes=1 << 20)


class LayerNormAttention(Attention):
    """The attention block with PyTorch's own LayerNorm."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(6), torch.nn.LayerNorm(6)


def layer_norm_attention():
    return LayerNormAttention(), torch.randn(2, 3, 6)


def test_plain_pytorch_is_checked_by_finite_differences():
    """PyTorch's LayerNorm gives a wrong gradient for a backward through a jvp, and the table says so."""
    setting = Setting(f"{__name__}:layer_norm_attention", seed=SEED)
    cells = {cell.name: cell for cell in CELLS}
    assert plain_fails(setting, cells["grad"]) == ""
    assert plain_fails(setting, cells["jvp"]) == ""
    assert "finite differences" in plain_fails(setting, cells["backward through a jvp"])


def wrong_engine(module):
    """An engine whose gradients are off by one part in a million."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient * (1 + 1e-6))


@pytest.mark.world_size(2)
def test_the_table_sees_a_wrong_gradient(monkeypatch):
    from zerofunc.verify import run

    initialize = run.initialize

    def spoiled(model, config):
        made = initialize(model=model, config=config)
        wrong_engine(made[0].module)
        return made

    monkeypatch.setattr(run, "initialize", spoiled)
    outcomes = verify_rank(Setting("zerofunc.verify.models:mlp", seed=SEED), 3, ["ordinary loss", "jvp"])
    assert [outcome.status for outcome in outcomes] == ["wrong", "wrong"]
