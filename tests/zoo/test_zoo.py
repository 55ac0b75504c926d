"""Every architecture of the zoo equals plain PyTorch at every stage, under every transform that PyTorch can do."""

import pytest

from zerofunc.verify.run import CANNOT
from zoo.catalogue import MODELS, cells_of, failures, judge_model
from zoo.outcomes import keep

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
# What PyTorch cannot do even with elementary operations: experts that select their tokens by value have no vmap.
NOT_IN_PYTORCH = {
    "zoo.language:qwen2_moe": ["vmap(grad)", "functional_call: per-sample grad", "forces + energy"],
}


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.world_size(2, timeout_s=900)
@pytest.mark.timeout(900)
@STAGES
@pytest.mark.parametrize("model", MODELS)
def test_every_architecture_equals_plain_pytorch(model, stage):
    outcomes = judge_model(model, stage, cells_of(model))
    keep(model, stage, outcomes)
    assert failures(outcomes) == []
    assert [outcome.cell for outcome in outcomes if outcome.status == CANNOT] == NOT_IN_PYTORCH.get(model, [])
