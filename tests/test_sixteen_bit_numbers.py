"""Which numbers bfloat16 and float16 engines compute: bit for bit those of one process that rounds where they do."""

import pytest
import torch
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

import zerofunc
from reference import SGD, STAGES, Net, build, config, data, engine_of, values
from zerofunc.compat import deepspeed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MICRO_STEPS = 4
SCALE = 256.0


def deepspeed_engine(stage, low, **more):
    section = {"enabled": True, **({"loss_scale": SCALE} if low == "fp16" else {})}
    given = config(stage, **{"optimizer": SGD, low: section, "gradient_clipping": 0.0, **more})
    return deepspeed.initialize(model=build(Net).float(), config=given)[0]


def loss_of(model, micro, rank, dtype):
    x = data(micro, rank).to(dtype)
    return (model(x) - x[:, :3].sin()).float().square().mean()


def local_gradients(model, micro, low):
    """Gradients of each rank's share of the loss in the model's type, as a rank's backward leaves them."""
    num_ranks = dist.get_world_size()
    factor = 1.0 / (MICRO_STEPS * num_ranks)  # powers of two, which round nothing
    scale = SCALE if low == "fp16" else 1.0
    losses = [loss_of(model, micro, rank, DTYPES[low]) for rank in range(num_ranks)]
    found = [torch.autograd.grad(loss * scale, list(model.parameters())) for loss in losses]
    return [[gradient * factor for gradient in gradients] for gradients in found]


def summed(model, stage, low, kept, travels):
    """The mean gradient over micro-steps and ranks: added up in ``kept``, over ranks in ``travels``."""
    by_micro = [local_gradients(model, micro, low) for micro in range(MICRO_STEPS)]
    total = []
    for index in range(len(list(model.parameters()))):
        table = [[ranks[rank][index].to(kept) for ranks in by_micro] for rank in range(dist.get_world_size())]
        if stage < 2:  # reduced at the boundary
            table = [[in_turn(row)] for row in table]
        reduced = [in_turn([gradient.to(travels) for gradient in column]) for column in zip(*table, strict=True)]
        total.append(in_turn([gradient.to(kept) for gradient in reduced]).float())
    return total


def in_turn(tensors):
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def accumulate(engine, low):
    for micro in range(MICRO_STEPS):
        engine.backward(loss_of(engine, micro, dist.get_rank(), DTYPES[low]))
        if micro + 1 < MICRO_STEPS:
            engine.step()


@pytest.mark.parametrize(
    ("low", "more"),
    [
        ("bf16", {}),
        ("fp16", {}),
        ("bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
        ("bf16", {"communication_data_type": "fp32"}),
    ],
)
@STAGES
@pytest.mark.world_size(1, 2)
def test_a_script_of_deepspeed_gets_its_roundings(stage, low, more):
    engine = deepspeed_engine(stage, low, gradient_accumulation_steps=MICRO_STEPS, **more)
    model = build(Net).float().to(DTYPES[low])
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    found = zerofunc.unshard(engine.module, zerofunc.shards(engine.module))
    torch.testing.assert_close(list(found.values()), masters, rtol=0, atol=0)
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    kept = DTYPES[more.get("data_types", {}).get("grad_accum_dtype", low)]
    travels = DTYPES[more.get("communication_data_type", low)]
    for _ in range(2):
        accumulate(engine, low)
        expected = summed(model, stage, low, kept, travels)
        gradients = list(zerofunc.full_gradients(engine.module).values())
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
        engine.step()
        for master, gradient in zip(masters, expected, strict=True):
            master.grad = gradient / (SCALE if low == "fp16" else 1.0)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        torch.testing.assert_close(list(values(engine.module).values()), list(model.parameters()), rtol=0, atol=0)
    assert engine.skipped_steps == 0


@STAGES
@pytest.mark.world_size(1, 2)
def test_the_own_initialize_rounds_no_master_and_no_sum(stage):
    engine = engine_of(
        build(Net).float(), stage, bf16={"enabled": True}, optimizer=SGD, gradient_accumulation_steps=MICRO_STEPS
    )
    masters = zerofunc.unshard(engine.module, zerofunc.shards(engine.module))
    torch.testing.assert_close(masters, values(build(Net).float()), rtol=0, atol=0)
    accumulate(engine, "bf16")
    expected = summed(build(Net).float().bfloat16(), stage, "bf16", torch.float64, torch.float64)
    for found, exact in zip(zerofunc.full_gradients(engine.module).values(), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


@STAGES
@pytest.mark.world_size(2)
def test_the_own_initialize_rounds_where_it_is_told(stage):
    keys = {"data_types": {"grad_accum_dtype": "bf16"}, "zerofunc": {"rounded_masters": True}}
    more = {"optimizer": SGD, "gradient_accumulation_steps": MICRO_STEPS, "bf16": {"enabled": True}}
    engine = engine_of(build(Net).float(), stage, **more, **keys)
    theirs = deepspeed_engine(stage, "bf16", gradient_accumulation_steps=MICRO_STEPS)
    for each in (engine, theirs):
        accumulate(each, "bf16")
    found, expected = (zerofunc.full_gradients(each.module) for each in (engine, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    masters = [zerofunc.unshard(each.module, zerofunc.shards(each.module)) for each in (engine, theirs)]
    torch.testing.assert_close(*masters, rtol=0, atol=0)


# ---- ways to a backward ---------------------------------------------------------------------------------------------


def by_loss(models, x):
    sum(model(x).float().square().mean() / (place + 1) for place, model in enumerate(models)).backward()


def by_cotangent(models, x):
    for model in models:
        result = model(x)
        result.backward(torch.ones_like(result))


def with_recomputation(models, x):
    for model in models:
        net = getattr(model, "module", model)
        hidden = checkpoint(net.encode, x.clone().requires_grad_(), use_reentrant=False)
        net.head(hidden).float().sum().backward()


@pytest.mark.parametrize("backward", [by_loss, by_cotangent, with_recomputation])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.world_size(2)
def test_backwards_by_hand_through_several_bfloat16_engines_are_those_of_bfloat16_modules(stage, backward):
    engines = [deepspeed_engine(stage, "bf16") for _ in range(2)]
    plain = [[build(Net).float().bfloat16() for _ in engines] for _ in range(dist.get_world_size())]
    optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.1) for models in zip(*plain, strict=True)]
    assert len(optimizers) == len(engines)
    backward(engines, data(0, dist.get_rank()).bfloat16())
    for rank, models in enumerate(plain):
        backward(models, data(0, rank).bfloat16())
    for engine, *models in zip(engines, *plain, strict=True):
        halves = [[p.grad / 2 for p in model.parameters()] for model in models]
        expected = [in_turn(list(gradients)).float() for gradients in zip(*halves, strict=True)]
        found = [deepspeed.utils.safe_get_full_grad(parameter) for parameter in engine.module.parameters()]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
