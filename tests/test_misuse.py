"""What goes wrong is said, on every rank; and what a user of ordinary parameters expects works."""

import copy
import gc
import io
import pickle
import time
import weakref

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn

import zerofunc
from reference import (
    ADAMW,
    STAGES,
    Net,
    adamw,
    assert_same,
    assert_same_gradients,
    build,
    data,
    engine_of,
    fit,
    mean_over_ranks,
    step_reference,
    values,
)

SMALL = {"page_bytes": 160, "resident_bytes": 0, "timeout_s": 20}


def sharded(stage, make=Net, seed=0, **more):
    return zerofunc.shard(build(make, seed), stage, **{**SMALL, **more})


# ---- optimizers and parameters that are not the shards ----------------------------------------------------------


@STAGES
@pytest.mark.world_size(1, 2)
def test_an_optimizer_on_parameters_of_a_sharded_module_raises_at_its_first_step(stage):
    module = sharded(stage)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fit(module, 0, dist.get_rank()).backward()
    with pytest.raises(RuntimeError, match=r"SGD was built on parameter 'first\.weight'.*zerofunc\.shards"):
        optimizer.step()


@STAGES
@pytest.mark.world_size(1, 2)
def test_an_optimizer_built_before_sharding_raises_at_its_first_step(stage):
    module = build(Net)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    zerofunc.shard(module, stage, **SMALL)
    fit(module, 0, dist.get_rank()).backward()
    with pytest.raises(RuntimeError, match=r"AdamW was built on parameter 'first\.weight'.*zerofunc\.initialize"):
        optimizer.step()


def convert(module):
    module.to(torch.float32)


def replace(module):
    module.middle.weight = nn.Parameter(torch.zeros(5, 6, dtype=torch.float64))


def tie(module):
    module.middle.bias = module.head.bias


def assign_data(module):
    module.middle.weight.data = torch.zeros(6, 5, dtype=torch.float64)


@pytest.mark.parametrize("change", [convert, replace, tie, assign_data])
@STAGES
@pytest.mark.world_size(1, 2)
def test_a_parameter_replaced_after_sharding_is_noticed(stage, change):
    module = sharded(stage)
    optimizer = torch.optim.SGD(zerofunc.shards(module).values(), lr=0.1)
    with pytest.raises(RuntimeError, match="(sharded|shards)"):
        change(module)
        zerofunc.shards(module)
    if change in (replace, tie):  # the others are refused at stage 3 and have changed nothing
        with pytest.raises(RuntimeError, match=r"'middle\..*replaced or moved"):
            optimizer.step()


# ---- backward without the engine ------------------------------------------------------------------------------------


@pytest.mark.world_size(1, 2)
def test_a_direct_backward_at_stage_0_raises_and_leaves_nothing():
    engine, model = engine_of(build(Net), 0), build(Net)
    with pytest.raises(RuntimeError, match=r"Direct calls to tensor\.backward"):
        fit(engine, 0, dist.get_rank()).backward()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    assert all(shard.grad is None for shard in zerofunc.shards(engine.module).values())
    engine.backward(fit(engine, 0, dist.get_rank()))
    mean_over_ranks(fit, model, 0).backward()
    assert_same_gradients(engine.module, model)


@pytest.mark.world_size(1, 2)
def test_a_direct_backward_at_stage_0_leaves_earlier_gradients_alone():
    engine, model = engine_of(build(Net), 0, gradient_accumulation_steps=2), build(Net)
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    with pytest.raises(RuntimeError, match=r"Direct calls to tensor\.backward"):
        fit(engine, 5, dist.get_rank()).backward()
    engine.backward(fit(engine, 1, dist.get_rank()))
    for micro in range(2):
        (mean_over_ranks(fit, model, micro) / 2).backward()
    assert_same_gradients(engine.module, model)


@pytest.mark.parametrize("accumulation", [1, 3])
@STAGES
@pytest.mark.world_size(1, 2)
def test_a_direct_backward_is_right_from_stage_1_and_where_allowed(stage, accumulation):
    allowed = {"direct_backward": True} if stage == 0 else {}
    engine = engine_of(build(Net), stage, gradient_accumulation_steps=accumulation, zerofunc=allowed)
    model = build(Net)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(step * accumulation, (step + 1) * accumulation):
            fit(engine, micro, dist.get_rank()).backward()
            engine.step()
            (mean_over_ranks(fit, model, micro) / accumulation).backward()
        optimizer.step()
        assert_same(engine, model)


def low_loss(model, step, rank):
    x = data(step, rank).to(next(model.parameters()).dtype)
    return (model(x) - x[:, :3].sin()).float().square().mean()


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@STAGES
@pytest.mark.world_size(1, 2)
def test_an_unscaled_direct_backward_raises_under_float16(stage):
    engine = engine_of(build(Net).float(), stage, **FP16)
    with pytest.raises(RuntimeError, match=r"Loss scaling is required.*engine\.scale"):
        low_loss(engine, 0, dist.get_rank()).backward()
    assert all(shard.grad is None for shard in zerofunc.shards(engine.module).values())


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_backward_scaled_by_hand_is_right_under_float16(stage):
    by_hand, by_engine = (engine_of(build(Net).float(), stage, **FP16) for _ in "12")
    for step in range(2):
        by_hand.scale(low_loss(by_hand, step, dist.get_rank())).backward()
        by_hand.step()
        by_engine.backward(low_loss(by_engine, step, dist.get_rank()))
        by_engine.step()
    torch.testing.assert_close(values(by_hand.module), values(by_engine.module), rtol=0, atol=0)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_loss_scaled_by_hand_allows_one_backward(stage):
    engine = engine_of(build(Net).float(), stage, **FP16)
    engine.scale(low_loss(engine, 0, dist.get_rank())).backward()
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        low_loss(engine, 1, dist.get_rank()).backward()


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_backward_of_the_engine_is_scaled_after_one_scaled_by_hand(stage):
    mixed, by_engine = (engine_of(build(Net).float(), stage, **FP16) for _ in "12")
    mixed.scale(low_loss(mixed, 0, dist.get_rank())).backward()
    mixed.backward(low_loss(mixed, 1, dist.get_rank()))
    for step in range(2):
        by_engine.backward(low_loss(by_engine, step, dist.get_rank()))
    found, expected = zerofunc.full_gradients(mixed.module), zerofunc.full_gradients(by_engine.module)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- arguments ------------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_loss_must_be_one_element_with_a_gradient(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    with pytest.raises(ValueError, match=r"one element, found \(4, 3\)"):
        engine.backward(engine(data(0, 0)))
    with pytest.raises(ValueError, match="one element, found float"):
        engine.backward(1.0)
    with pytest.raises(ValueError, match="does not require a gradient"):
        engine.backward(fit(engine, 0, 0).detach())
    with torch.no_grad(), pytest.raises(ValueError, match="does not require a gradient"):
        engine.backward(fit(engine, 0, 0))
    engine.backward(fit(engine, 0, dist.get_rank())[None])
    mean_over_ranks(fit, model, 0).backward()
    assert_same_gradients(engine.module, model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, "stage is 4; expected 0, 1, 2 or 3"),
        ({"stage": "3"}, "stage is '3'"),
        ({"stage": 3, "unsplit": ["nowhere"]}, "unsplit names 'nowhere', which is not a module of Net"),
        ({"stage": 3, "unsplit": ["first.weight"]}, r"unsplit names 'first\.weight'"),
        ({"stage": 3, "page_bytes": 0}, "page_bytes"),
        ({"stage": 3, "resident_bytes": -1}, "resident_bytes"),
        ({"stage": 3, "persistence_bytes": -1}, "persistence_bytes"),
        ({"stage": 3, "timeout_s": 0}, "timeout_s"),
    ],
)
@pytest.mark.world_size(2)
def test_arguments_of_shard_are_checked_before_anything_is_changed(arguments, message):
    module, model = build(Net), build(Net)
    with pytest.raises(ValueError, match=message):
        zerofunc.shard(module, **arguments)
    assert_same(module, model)
    zerofunc.shard(module, 3, **SMALL)
    assert_same(module, model)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_module_is_sharded_once(stage):
    module = sharded(stage)
    assert zerofunc.shard(module, stage, **SMALL) is module
    with pytest.raises(ValueError, match=r"sharded already, with other settings: page_bytes is 160"):
        zerofunc.shard(module, stage)
    with pytest.raises(ValueError, match="sharded already"):
        zerofunc.shard(nn.Sequential(module.head, nn.Linear(3, 3)), stage)


@pytest.mark.world_size(1)
def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(ValueError, match="no parameters to shard"):
        zerofunc.shard(nn.ReLU(), 3)
    with pytest.raises(ValueError, match="not sharded; call zerofunc.shard"):
        zerofunc.shards(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no parameter of a sharded module"), zerofunc.gathered(nn.Linear(2, 2)):
        pass


# ---- changes between forward and backward -----------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_backward_over_a_graph_older_than_the_step_raises(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    old, old_loss = fit(engine, 0, dist.get_rank()), fit(model, 0, dist.get_rank())
    engine.backward(fit(engine, 1, dist.get_rank()))
    engine.step()
    step_reference(model, optimizer, fit, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old_loss.backward()
    with pytest.raises(RuntimeError, match="(modified by an inplace operation|changed between a forward)"):
        engine.backward(old)
    engine.zero_grad()
    optimizer.zero_grad()
    engine.backward(fit(engine, 2, dist.get_rank()))
    engine.step()
    step_reference(model, optimizer, fit, 2)
    assert_same(engine, model)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_backward_raises_after_a_step_of_the_callers_optimizer(stage):
    module = sharded(stage)
    optimizer = torch.optim.SGD(zerofunc.shards(module).values(), lr=0.1)
    old = fit(module, 0, dist.get_rank())
    fit(module, 1, dist.get_rank()).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="(modified by an inplace operation|changed between a forward)"):
        old.backward()


class Refusal(torch.autograd.Function):
    """Ends a backward in the middle of the model."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("refused")


def refused(model, step, rank):
    return model.head(Refusal.apply(model.encode(data(step, rank)))).sum()


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_failed_backward_leaves_nothing_behind_once_gradients_are_zeroed(stage):
    module, model = sharded(stage), build(Net)
    optimizer, expected = torch.optim.AdamW(zerofunc.shards(module).values(), **ADAMW), adamw(model)
    with pytest.raises(ArithmeticError, match="refused"):
        refused(module, 3, dist.get_rank()).backward()
    optimizer.zero_grad()
    for step in range(2):
        fit(module, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_reference(model, expected, fit, step)
        assert_same(module, model)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_failed_backward_of_the_engine_leaves_nothing_behind(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    with pytest.raises(ArithmeticError, match="refused"):
        engine.backward(refused(engine, 3, dist.get_rank()))
    engine.backward(fit(engine, 0, dist.get_rank()))
    mean_over_ranks(fit, model, 0).backward()
    assert_same_gradients(engine.module, model)


@pytest.mark.world_size(1, 2)
def test_a_shard_changed_by_hand_before_the_backward_raises_at_stage_3():
    module = sharded(3)
    loss = fit(module, 0, dist.get_rank())
    with torch.no_grad():
        for shard in zerofunc.shards(module).values():
            shard.mul_(2.0)
    with pytest.raises(RuntimeError, match="(modified by an inplace operation|changed between a forward)"):
        loss.backward()


@STAGES
@pytest.mark.world_size(1, 2)
def test_shards_changed_by_hand_are_seen_by_the_next_forward(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    for step in range(2):
        with torch.no_grad():
            for shard in zerofunc.shards(engine.module).values():
                shard.mul_(2.0).add_(0.1)
            for parameter in model.parameters():
                parameter.mul_(2.0).add_(0.1)
        torch.testing.assert_close(engine(data(step, 0)), model(data(step, 0)))
        zerofunc.refresh(engine.module)
        assert_same(engine, model)


# ---- ranks that diverge ---------------------------------------------------------------------------------------------


def assert_diverges(program, *words, within_s=10):
    start = time.monotonic()
    with pytest.raises(zerofunc.DivergenceError) as caught:
        program()
    assert time.monotonic() - start < within_s
    for word in words:
        assert word in str(caught.value)


@pytest.mark.world_size(2)
def test_ranks_that_read_different_pages_are_told_what_each_wanted():
    module = sharded(3, timeout_s=3.01)
    mine = module.first if dist.get_rank() == 0 else module.head
    assert_diverges(lambda: mine.weight.detach().clone(), "rank 0: gather of", "first.weight", "rank 1:", "head.weight")


@STAGES
@pytest.mark.world_size(2)
def test_a_backward_on_one_rank_only_ends_on_both(stage):
    engine = engine_of(build(Net), stage, zerofunc={"timeout_s": 3.02 + stage / 100})

    def program():
        loss = fit(engine, 0, dist.get_rank())
        if dist.get_rank() == 0:
            engine.backward(loss)
        engine.step()

    assert_diverges(program)


@pytest.mark.world_size(2)
def test_a_forward_too_many_on_one_rank_ends_on_both():
    engine = engine_of(build(Net), 3, zerofunc={"timeout_s": 3.07})

    def program():
        if dist.get_rank() == 0:
            engine(data(0, 0))
        engine.backward(fit(engine, 0, dist.get_rank()))
        engine.step()

    # rank 0 begins its next forward, rank 1 its backward
    assert_diverges(program, "rank 0: gather of page 1 (first.bias)", "rank 1: gather of page 2 (middle.weight)")


@pytest.mark.parametrize("what", ["forward", "backward", "step"])
@pytest.mark.world_size(2)
def test_a_rank_that_leaves_is_noticed_within_the_timeout(what):
    engine = engine_of(build(Net), 3, zerofunc={"timeout_s": {"forward": 1.51, "backward": 1.52, "step": 1.53}[what]})

    def program():
        for name in ("forward", "backward", "step"):
            if name == what and dist.get_rank() == 1:
                return
            if name == "forward":
                loss = fit(engine, 0, 0)
            elif name == "backward":
                engine.backward(loss)
            else:
                engine.step()

    if dist.get_rank() == 1:
        program()
    else:
        assert_diverges(program, "rank 0 of 2 waited at", "did not come within 1.5", within_s=8)


@pytest.mark.world_size(2)
def test_ranks_that_shard_different_modules_are_told():
    size = 3 + dist.get_rank()
    assert_diverges(lambda: zerofunc.shard(nn.Linear(size, 2), 3, timeout_s=3.08), "(2, 3)", "(2, 4)")


# ---- what has no address -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["data_ptr", "untyped_storage", "storage"])
@pytest.mark.world_size(1, 2)
def test_an_address_is_refused_by_name_at_stage_3(method):
    weight = sharded(3).middle.weight
    with pytest.raises(RuntimeError, match=rf"{method}\(\) of parameter 'middle\.weight'.*zerofunc\.gathered"):
        getattr(weight, method)()


@STAGES
@pytest.mark.world_size(1, 2)
def test_an_address_is_given_inside_gathered(stage):
    module, model = sharded(stage), build(Net)
    with zerofunc.gathered(module):
        for name, parameter in module.named_parameters():
            expected = model.get_parameter(name)
            start = (parameter.data_ptr() - parameter.untyped_storage().data_ptr()) // 8
            found = torch.tensor(parameter.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float64)
            assert torch.equal(found[start : start + expected.numel()].view(expected.shape), expected)


class Scalars(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.slope = nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.tensor([0.25]))
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return self.scale * x


@STAGES
@pytest.mark.world_size(1, 2)
def test_values_are_read_as_from_an_ordinary_parameter(stage):
    module, model = sharded(stage, Scalars), build(Scalars)
    assert module.scale.item() == 2.5
    assert float(module.slope) == 0.25
    assert bool(module.scale > 2)
    assert module.weight.tolist() == model.weight.tolist()
    assert np.array_equal(module.weight.detach().numpy(), model.weight.detach().numpy())
    assert np.array_equal(np.asarray(module.weight.detach()), model.weight.detach().numpy())
    assert np.array_equal(module.weight.numpy(force=True), model.weight.detach().numpy())
    with pytest.raises(RuntimeError, match="requires grad"):
        module.weight.numpy()
    assert torch.equal(module.weight.data, model.weight.data)
    assert torch.equal(module.weight.cpu().detach(), model.weight.detach())
    assert module.weight[1, 2].item() == model.weight[1, 2].item()
    assert [row.tolist() for row in module.weight] == model.weight.tolist()


def read_state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def read_data(module):
    return [parameter.data.sum() for parameter in module.parameters()]


def read_views(module):
    return [parameter.view(-1)[1:].sum() for parameter in module.parameters()]


def double_in_place(module):
    return [parameter.mul_(2.0).sum() for parameter in module.parameters()]


@pytest.mark.parametrize("use", [read_state, read_data, read_views, double_in_place])
@STAGES
@pytest.mark.world_size(1, 2)
def test_parameters_are_read_and_written_in_inference_mode(stage, use):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    with torch.inference_mode():
        torch.testing.assert_close(use(engine.module), use(model))
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    step_reference(model, optimizer, fit, 0)
    assert_same(engine, model)


@STAGES
@pytest.mark.world_size(1, 2)
def test_an_engine_that_is_dropped_frees_its_parameters_and_shards(stage):
    engine = engine_of(build(Net), stage)
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    alive = {f"parameter {name}": weakref.ref(p) for name, p in engine.module.named_parameters()}
    alive |= {f"shard {name}": weakref.ref(shard) for name, shard in zerofunc.shards(engine.module).items()}
    del engine
    gc.collect()
    assert [name for name in alive if alive[name]() is not None] == []


@pytest.mark.world_size(1, 2)
def test_printing_a_stage_3_parameter_names_it_and_reads_nothing():
    module = sharded(3)
    moved = zerofunc.usage(module).moved_bytes
    if dist.get_rank() == 0:  # no rank need join in
        text = repr(module.middle.weight)
        assert "'middle.weight'" in text and "(5, 6)" in text and "float64" in text
        assert "middle.weight" in str(module.middle.weight)
        assert repr(module) == repr(build(Net))
    assert zerofunc.usage(module).moved_bytes == moved


# ---- copies and files -----------------------------------------------------------------------------------------------


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("through", [through_torch_save, through_pickle])
@STAGES
@pytest.mark.world_size(1, 2)
def test_a_state_dict_is_saved_as_ordinary_tensors(stage, through):
    module, model = sharded(stage), build(Net)
    loaded = through(module.state_dict())
    assert list(loaded) == list(model.state_dict())
    assert {type(value) for value in loaded.values()} == {torch.Tensor}
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    model.load_state_dict(loaded)
    assert_same(module, model, rtol=0, atol=0)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_parameter_is_saved_as_an_ordinary_parameter(stage):
    module, model = sharded(stage), build(Net)
    loaded = through_torch_save(module.head.weight)
    assert type(loaded) is nn.Parameter
    assert torch.equal(loaded, model.head.weight)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_deep_copy_is_a_module_of_its_own(stage):
    module, model = sharded(stage), build(Net)
    copied, copied_model = copy.deepcopy(module), copy.deepcopy(model)
    assert_same(copied, model, rtol=0, atol=0)
    with torch.no_grad():
        for parameter, expected in zip(module.parameters(), model.parameters(), strict=True):
            parameter.mul_(2.0)
            expected.mul_(2.0)
    assert_same(copied, copied_model, rtol=0, atol=0)
    assert_same(module, model, rtol=0, atol=0)
    torch.testing.assert_close(copied(data(0, 0)), copied_model(data(0, 0)))
    torch.testing.assert_close(module(data(0, 0)), model(data(0, 0)))


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_deep_copy_and_its_original_both_train(stage):
    module, model = sharded(stage), build(Net)
    copied, copied_model = copy.deepcopy(module), copy.deepcopy(model)
    own = zerofunc.shards(copied).values() if stage == 3 else copied.parameters()
    optimizers = [torch.optim.AdamW(zerofunc.shards(module).values(), **ADAMW), torch.optim.AdamW(own, **ADAMW)]
    references = [adamw(model), adamw(copied_model)]
    for step in range(2):
        fit(module, step, dist.get_rank()).backward()
        rank = dist.get_rank() if stage == 3 else 0  # below stage 3 the copy is an ordinary module of each rank
        fit(copied, step + 10, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step_reference(model, references[0], fit, step)
        if stage == 3:
            step_reference(copied_model, references[1], fit, step + 10)
        else:
            references[1].zero_grad()
            fit(copied_model, step + 10, rank).backward()
            references[1].step()
    assert_same(module, model)
    assert_same(copied, copied_model)


# ---- writing into parameters ----------------------------------------------------------------------------------------


def load(module):
    module.load_state_dict(build(Net, seed=5).state_dict())


def initialise(module):
    torch.manual_seed(3)
    nn.init.xavier_uniform_(module.first.weight)
    nn.init.orthogonal_(module.middle.weight)
    nn.init.trunc_normal_(module.head.weight, std=0.5)
    nn.init.zeros_(module.head.bias)
    nn.init.constant_(module.first.bias, 0.3)
    module.middle.reset_parameters()


@torch.no_grad()
def write_parts(module):
    module.first.weight[1].fill_(7.0)
    module.first.weight[:, 2:].mul_(2.0)
    module.middle.weight.t().copy_(torch.arange(30.0, dtype=torch.float64).view(6, 5))
    module.middle.bias.copy_(module.head.weight.sum(0))
    module.head.bias.data.copy_(torch.ones(3, dtype=torch.float64))
    module.head.weight += module.head.weight
    torch.add(module.first.bias, 1.0, out=module.first.bias)
    module.first.weight.view(-1)[3:5] = torch.tensor([1.0, 2.0], dtype=torch.float64)
    module.first.weight.clamp_(-1, 1)


@torch.no_grad()
def apply_foreach(module):
    parameters = list(module.parameters())
    torch._foreach_mul_(parameters, 2.0)
    torch._foreach_add_(parameters, [parameter * 0.5 for parameter in parameters])


@pytest.mark.parametrize("write", [load, initialise, write_parts, apply_foreach])
@STAGES
@pytest.mark.world_size(1, 2)
def test_writes_into_parameters_reach_the_shards(stage, write):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    for step in range(2):
        write(engine.module)
        write(model)
        assert_same(engine, model)
        shards = zerofunc.unshard(engine.module, zerofunc.shards(engine.module))
        torch.testing.assert_close(shards, values(model), rtol=1e-9, atol=1e-11)
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, fit, step)
        assert_same(engine, model)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.world_size(2)
def test_ranks_that_draw_different_numbers_agree_in_the_next_forward(stage):
    module = sharded(stage)
    torch.manual_seed(dist.get_rank())
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    y = module(data(0, 0)).detach()
    everyone = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(everyone, y)
    assert torch.equal(everyone[0], everyone[1])


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_state_dict_of_a_sharded_module_loads_into_another(stage):
    source, target = sharded(stage), sharded(3 - stage, seed=4)
    target.load_state_dict(source.state_dict())
    assert_same(target, build(Net), rtol=0, atol=0)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_state_dict_that_does_not_fit_is_refused(stage):
    module, model = sharded(stage), build(Net)
    state = {**build(Net, seed=5).state_dict(), "head.bias": torch.zeros(4, dtype=torch.float64)}
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.bias"):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError):
        model.load_state_dict(state)
    assert_same(module, model, rtol=0, atol=0)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_write_where_autograd_records_raises_as_in_plain_pytorch(stage):
    module = sharded(stage)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        module.head.bias.add_(1.0)
    assert_same(module, build(Net), rtol=0, atol=0)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_moving_average_of_the_weights_is_updated_in_place(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    average, average_model = copy.deepcopy(engine.module), copy.deepcopy(model)
    for step in range(3):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, fit, step)
        with torch.no_grad():
            for mean, now in ((average, engine.module), (average_model, model)):
                for target, parameter in zip(mean.parameters(), now.parameters(), strict=True):
                    target.lerp_(parameter, 0.3) if step else target.mul_(0.7).add_(parameter, alpha=0.3)
        assert_same(average, average_model)
        torch.testing.assert_close(average(data(0, 0)), average_model(data(0, 0)))
    assert_same(engine, model)


@STAGES
@pytest.mark.world_size(1, 2)
def test_what_the_first_rank_writes_inside_gathered_is_taken_by_all(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    with torch.no_grad():
        with zerofunc.gathered(engine.module, write=True):
            if dist.get_rank() == 0:
                for parameter in engine.module.parameters():
                    parameter.mul_(3.0)
            else:
                engine.module.head.bias.fill_(100.0)
        for parameter in model.parameters():
            parameter.mul_(3.0)
    assert_same(engine, model)
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    step_reference(model, optimizer, fit, 0)
    assert_same(engine, model)


@STAGES
@pytest.mark.world_size(2)
def test_some_parameters_may_be_gathered(stage):
    module, model = sharded(stage), build(Net)
    with zerofunc.gathered([module.head.weight]):
        if dist.get_rank() == 0:  # without the other rank
            assert torch.equal(module.head.weight.detach().clone(), model.head.weight)
    with torch.no_grad(), zerofunc.gathered([module.head.weight], write=True):
        if dist.get_rank() == 0:
            module.head.weight.fill_(1.0)
    with torch.no_grad():
        model.head.weight.fill_(1.0)
    assert_same(module, model, rtol=0, atol=0)


# ---- trees ----------------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(1, 2, 4)
def test_trees_go_to_full_tensors_and_back(stage):
    module, model = sharded(stage), build(Net)
    shards = zerofunc.shards(module)
    full = zerofunc.unshard(module, shards)
    torch.testing.assert_close(full, values(model), rtol=0, atol=0)
    torch.testing.assert_close(zerofunc.reshard(module, full), {n: s.detach() for n, s in shards.items()})
    some = {"head.bias": shards["head.bias"].detach().int(), "first.weight": shards["first.weight"]}
    found = zerofunc.unshard(module, some)
    assert list(found) == list(some)
    assert torch.equal(found["head.bias"], model.head.bias.detach().int())
    assert torch.equal(found["first.weight"], model.first.weight)


@STAGES
@pytest.mark.world_size(1, 2, 4)
def test_gradients_are_gathered_in_full(stage):
    module, model = sharded(stage), build(Net)
    assert zerofunc.full_gradients(module) == dict.fromkeys(dict(model.named_parameters()))
    module.encode(data(0, dist.get_rank())).square().mean().backward()
    mean_over_ranks(lambda model, step, rank: model.encode(data(0, rank)).square().mean(), model, 0).backward()
    assert_same_gradients(module, model)
    assert zerofunc.full_gradients(module)["head.weight"] is None


@STAGES
@pytest.mark.world_size(1, 2, 4)
def test_inner_products_are_over_all_ranks(stage):
    module = sharded(stage)
    a, b = ({name: torch.randn_like(p) for name, p in build(Net, seed=seed).named_parameters()} for seed in (1, 2))
    expected = sum((a[name] * b[name]).sum() for name in a)
    parts = zerofunc.reshard(module, a), zerofunc.reshard(module, b)
    torch.testing.assert_close(zerofunc.vdot(*parts), expected.detach())
    torch.testing.assert_close(zerofunc.vdot(*parts, module=module), expected.detach())


@STAGES
@pytest.mark.world_size(1, 2)
def test_trees_that_do_not_fit_are_refused(stage):
    module = sharded(stage)
    shards = {name: shard.detach() for name, shard in zerofunc.shards(module).items()}
    full = zerofunc.unshard(module, shards)
    longer = {**shards, "head.bias": torch.zeros(9, dtype=torch.float64)}
    with pytest.raises(ValueError, match="'nothing' is not a parameter of Net"):
        zerofunc.unshard(module, {"nothing": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'head\.bias' has shape \(9,\)"):
        zerofunc.unshard(module, longer)
    with pytest.raises(ValueError, match="'nothing' is not a parameter of Net"):
        zerofunc.reshard(module, {"nothing": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'head\.bias' has shape \(9,\); the parameter has \(3,\)"):
        zerofunc.reshard(module, {**full, "head.bias": torch.zeros(9)})
    with pytest.raises(ValueError, match=r"differ in names: \['head\.bias'\]"):
        zerofunc.vdot(shards, {name: shards[name] for name in shards if name != "head.bias"})
    with pytest.raises(ValueError, match=r"'head\.bias' has shapes"):
        zerofunc.vdot(shards, longer)
    with pytest.raises(ValueError, match="0 sharded modules have such shards"):
        zerofunc.vdot({"nothing": torch.zeros(1)}, {"nothing": torch.zeros(1)})
    with pytest.raises(ValueError, match="not sharded"):
        zerofunc.full_gradients(build(Net))
