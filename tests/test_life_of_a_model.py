"""Between sharding and the end: a model is frozen and thawed, averaged, initialised anew, copied, shared."""

import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofunc
from reference import (
    ADAMW,
    STAGES,
    Branches,
    Net,
    adamw,
    assert_same,
    build,
    config,
    engine_of,
    fit,
    mean_over_ranks,
    step_reference,
    values,
)
from zerofunc.module.sharding import sharding_of

# ---- frozen and thawed ----------------------------------------------------------------------------------------------


def train_with_freezing(engine, model, optimizer, phases, loss=fit):
    """Two steps per phase, in which the modules of that name are frozen."""
    for step in range(2 * len(phases)):
        for module in (engine.module, model):
            for name, child in module.named_children():
                child.requires_grad_(name not in phases[step // 2])
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)


@STAGES
@pytest.mark.world_size(1, 2)
def test_layers_are_frozen_and_thawed_between_steps(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    train_with_freezing(engine, model, adamw(model), [[], ["middle"], ["first", "middle"], []])


@STAGES
@pytest.mark.world_size(1, 2)
def test_what_was_frozen_when_it_was_sharded_trains_once_it_is_thawed(stage):
    """Gradual unfreezing; the optimizer is given all parameters at the start."""

    def frozen():
        model = build(Net)
        model.first.requires_grad_(False)
        model.middle.requires_grad_(False)
        return model

    wrapped, model = frozen(), frozen()
    engine = zerofunc.initialize(wrapped, config(stage), torch.optim.AdamW(wrapped.parameters(), **ADAMW))[0]
    assert set(zerofunc.shards(engine.module)) == {"head.weight", "head.bias"}
    train_with_freezing(engine, model, adamw(model), [["first", "middle"], ["first"], []])
    assert set(zerofunc.shards(engine.module)) == {name for name, _ in model.named_parameters()}


@STAGES
@pytest.mark.world_size(2)
def test_frozen_pages_are_not_reduced(stage):
    engine = engine_of(build(Net), stage)

    def moved():
        with zerofunc.gathered(engine.module):
            before = engine.usage().moved_bytes
            engine.backward(fit(engine, 0, dist.get_rank()))
            return engine.usage().moved_bytes - before

    whole = moved()
    engine.module.first.requires_grad_(False)
    engine.module.middle.requires_grad_(False)
    assert 0 < moved() < 0.5 * whole


@STAGES
@pytest.mark.world_size(2)
def test_a_layer_is_frozen_between_micro_batches(stage):
    """What it has gathered until then counts, as in plain PyTorch."""
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=3), build(Net)
    optimizer = adamw(model)
    for micro, frozen in enumerate([[], ["first", "head"], ["head"], [], [], []]):
        for module in (engine.module, model):
            for name, child in module.named_children():
                child.requires_grad_(name not in frozen)
        engine.backward(fit(engine, micro, dist.get_rank()))
        engine.step()
        (mean_over_ranks(fit, model, micro) / 3).backward()
        if micro % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            assert_same(engine, model)


@STAGES
@pytest.mark.world_size(2)
def test_gradients_of_a_frozen_layer_are_zeroed_too(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.module.first.requires_grad_(False)
    engine.zero_grad()
    engine.module.first.requires_grad_(True)
    engine.backward(fit(engine, 1, dist.get_rank()))
    engine.step()
    step_reference(model, optimizer, fit, 1)
    assert_same(engine, model)


# ---- averaged, initialised, copied ----------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(1, 2)
def test_an_average_of_the_weights_is_kept_in_a_deep_copy(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    average, plain = copy.deepcopy(engine.module), copy.deepcopy(model)
    optimizer = adamw(model)
    for step in range(3):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, fit, step)
        with torch.no_grad():
            for mean, now in zip(average.parameters(), engine.module.parameters(), strict=True):
                mean.lerp_(now, 0.25)
            for mean, now in zip(plain.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.25)
    torch.testing.assert_close(values(average), values(plain), rtol=1e-12, atol=0)
    assert_same(engine, model)
    with torch.no_grad():
        torch.testing.assert_close(fit(average, 5, 0), fit(plain, 5, 0))


@STAGES
@pytest.mark.world_size(1, 2)
def test_weights_are_swapped_for_their_average_and_back(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    kept = {name: value / 2 for name, value in values(engine.module).items()}
    for step in range(2):
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                weights = parameter.clone()
                parameter.copy_(kept[name])
                kept[name] = weights
        halves = {name: value / 2 for name, value in values(model).items()} if step == 0 else values(model)
        torch.testing.assert_close(values(engine.module), halves)
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    step_reference(model, optimizer, fit, 0)
    assert_same(engine, model)


def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.constant_(module.bias, 0.1)


@STAGES
@pytest.mark.world_size(1, 2)
def test_weights_are_initialised_after_the_engine_was_made(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    for module in (engine.module, model):
        torch.manual_seed(7)
        with torch.no_grad():
            module.apply(initialise)
    assert_same(engine, model)
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    step_reference(model, optimizer, fit, 0)
    assert_same(engine, model)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_embeddings_are_resized_before_the_engine_is_made(stage):
    from transformers import GPT2Config, GPT2LMHeadModel

    def resized():
        torch.manual_seed(0)
        sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11, "n_positions": 8}
        model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).double()
        model.resize_token_embeddings(13)
        return model

    def loss(model, step, rank):
        tokens = torch.randint(13, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        return model(input_ids=tokens, labels=tokens).loss

    engine, model = engine_of(resized(), stage), resized()
    optimizer = adamw(model)
    for step in range(2):
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)


@pytest.mark.slow
@STAGES
@pytest.mark.world_size(2)
def test_averages_of_libraries(stage):
    """torch.optim.swa_utils, in one operator for all parameters, and EMAModel of diffusers, swapped in and out."""
    from diffusers.training_utils import EMAModel

    engine, model = engine_of(build(Net), stage), build(Net)
    averages = [AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.75)) for one in (engine.module, model)]
    others = [EMAModel(one.parameters(), decay=0.75) for one in (engine.module, model)]
    optimizer = adamw(model)
    for step in range(2):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, fit, step)
        for average, other, one in zip(averages, others, (engine.module, model), strict=True):
            average.update_parameters(one)
            other.step(one.parameters())
    torch.testing.assert_close(values(averages[0].module), values(averages[1].module), rtol=1e-12, atol=0)
    for other, one in zip(others, (engine.module, model), strict=True):
        other.store(one.parameters())
        other.copy_to(one.parameters())
    assert_same(engine, model)
    torch.testing.assert_close(fit(engine, 3, 0), fit(model, 3, 0))
    for other, one in zip(others, (engine.module, model), strict=True):
        other.restore(one.parameters())
    engine.backward(fit(engine, 2, dist.get_rank()))
    engine.step()
    step_reference(model, optimizer, fit, 2)
    assert_same(engine, model)


# ---- parametrized ----------------------------------------------------------------------------------------------------


def parametrized():
    model = Net()
    weight_norm(model.first)
    orthogonal(model.middle)
    spectral_norm(model.head)
    return model


@STAGES
@pytest.mark.world_size(1, 2)
def test_parametrized_weights_train(stage):
    engine, model = engine_of(build(parametrized), stage), build(parametrized)
    optimizer = adamw(model)
    for step in range(2):
        with parametrize.cached():
            engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        optimizer.zero_grad()
        with parametrize.cached():
            mean_over_ranks(fit, model, step).backward()
        optimizer.step()
        assert_same(engine, model)


@STAGES
@pytest.mark.world_size(2)
def test_a_parametrization_that_comes_after_sharding_is_noticed(stage):
    engine = engine_of(build(Net), stage)
    with pytest.raises(RuntimeError, match=r"first\.weight.*(sharded|replaced)"):
        weight_norm(engine.module.first)
        engine.backward(fit(engine, 0, dist.get_rank()))
        engine.step()


# ---- shared ---------------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(2)
def test_two_engines_cannot_share_a_module(stage):
    shared = build(Net)
    engine = engine_of(nn.ModuleDict({"shared": shared, "own": nn.Linear(2, 2).double()}), stage)
    before = values(engine.module)
    other = nn.Sequential(shared.first, nn.Linear(6, 2).double())
    untouched = {name: value for name, value in values(other).items() if name.startswith("1.")}
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is sharded already; a parameter belongs to one"):
        engine_of(other, stage)
    assert values(engine.module).keys() == before.keys()
    torch.testing.assert_close(values(engine.module), before, rtol=0, atol=0)
    assert type(other[1].weight) is nn.Parameter
    torch.testing.assert_close(values(other)["1.weight"], untouched["1.weight"], rtol=0, atol=0)


@STAGES
@pytest.mark.world_size(2)
def test_the_state_dict_between_steps_is_that_of_one_process(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    for step in range(2):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, fit, step)
        with zerofunc.gathered(engine.module):
            state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-9, atol=1e-11)
    fresh = engine_of(build(Net, seed=3), stage)
    fresh.module.load_state_dict(state)
    torch.testing.assert_close(values(fresh.module), state, rtol=0, atol=0)


@STAGES
def test_shards_have_the_order_of_the_module_whatever_the_pages(stage):
    model = build(Branches)
    zerofunc.shard(model, stage, unsplit=["head"])
    names = [name for name, _ in model.named_parameters()]
    assert [slot.name for page in sharding_of(model).pages for slot in page.layout.slots] != names
    assert list(zerofunc.shards(model)) == names
