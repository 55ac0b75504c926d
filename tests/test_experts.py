"""Mixtures of experts: ranks use different experts, in different numbers and orders, at every stage."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.utils import parametrize

import zerofunc
from reference import adamw, assert_same, build, data, engine_of, stages, step_reference, train_both


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4))


class Mixture(nn.Module):
    """The best two of five experts for each sample; an expert that no sample of this rank wants is not read."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 5)
        self.experts = nn.ModuleList(Expert() for _ in range(5))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, place, None] * expert(x[rows]))
        return out


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList([Mixture(), Mixture()])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def chosen_by(model, x):
    """Which experts of the first block a batch uses."""
    model = getattr(model, "module", model)
    return set(model.blocks[0].router(model.stem(x)).topk(2).indices.flatten().tolist())


def batch(step, rank):
    """Two samples, so that most experts are not used."""
    return data(step, rank, 2, 4)


def fit(model, step, rank):
    x = batch(step, rank)
    return (model(x) - x[:, :3].sin()).square().mean()


def penalty(model, step, rank):
    """A gradient penalty: the experts are read again in the backward of a backward."""
    x = batch(step, rank).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return (slope.square().sum(1) - 1).square().mean()


def meanflow(model, step, rank):
    """A forward derivative in the loss."""
    x = batch(step, rank)
    u, du = torch.func.jvp(model, (x,), (x.cos(),))
    return (u - (x[:, :3] - 0.5 * du).detach()).square().mean() + du.square().mean()


UNSPLIT = [
    {"zerofunc": {"unsplit": ["blocks.0", "blocks.1"]}},
    {"leaf": {"classes": ["Mixture"]}},
    {"leaf": {"names": ["blocks.0.experts", "blocks.1.experts"]}},
    {"leaf": {"name_suffixes": ["experts"]}},
]


def options(stage, unsplit):
    leaf = {"leaf_module": unsplit["leaf"]} if "leaf" in unsplit else {}
    return {"zero_optimization": {"stage": stage, **leaf}, **{k: v for k, v in unsplit.items() if k != "leaf"}}


@pytest.mark.parametrize("loss", [fit, penalty, meanflow])
@stages(3)
@pytest.mark.world_size(1, 2)
def test_ranks_choose_experts_of_their_own(stage, loss):
    engine, _ = train_both(Blocks, loss, stage, **options(stage, UNSPLIT[0]))
    if dist.get_world_size() > 1:
        chosen = [chosen_by(engine, batch(step, rank)) for rank in range(2) for step in range(3)]
        assert len({frozenset(one) for one in chosen}) > 1


@pytest.mark.parametrize("unsplit", UNSPLIT[1:])
@pytest.mark.world_size(2)
def test_the_config_names_modules_that_are_whole(unsplit):
    engine, _ = train_both(Blocks, fit, 3, **options(3, unsplit))
    pages = engine.module.__dict__["_zerofunc"].pages
    for block in range(2):
        names = [{s.name for s in page.layout.slots if f"blocks.{block}.experts" in s.name} for page in pages]
        assert [len(one) for one in names if one] == [20]


@pytest.mark.world_size(2)
def test_experts_that_are_not_whole_end_in_an_error_that_says_so():
    engine = engine_of(build(Blocks), 3, zerofunc={"timeout_s": 3.03})
    with pytest.raises(zerofunc.DivergenceError, match=r"(?s)blocks\.0\.experts.*unsplit"):
        for step in range(5):
            engine.backward(fit(engine, step, dist.get_rank()))


def frozen_with_adapters():
    """Experts whose first layer is frozen, and has a trainable correction of low rank."""

    class Correction(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(7, 2) / 3), nn.Parameter(torch.randn(2, 4) / 3)

        def forward(self, weight):
            return weight + self.up @ self.down

    model = Blocks()
    for block in model.blocks:
        for expert in block.experts:
            expert.requires_grad_(False)
            parametrize.register_parametrization(expert[0], "weight", Correction())
    return model


@pytest.mark.parametrize("resident_bytes", [0, 4000, 20_000])
@pytest.mark.parametrize("loss", [fit, penalty])
@pytest.mark.world_size(2)
def test_experts_may_be_frozen_and_have_adapters(loss, resident_bytes):
    """What is whole then has a page that is frozen and one that is trained, which a rank uses alternately."""
    ours = {**UNSPLIT[0]["zerofunc"], "resident_bytes": resident_bytes}
    engine, _ = train_both(frozen_with_adapters, loss, 3, steps=5, zerofunc=ours)
    pages = engine.module.__dict__["_zerofunc"].pages
    assert [page.layout.unsplit for page in pages].count("blocks.0") == 2
    assert max(page.gathered_bytes for page in pages) > 1500


@pytest.mark.parametrize(("stage", "experts"), [(0, "eager"), (3, "eager"), (3, "batched_mm")])
@pytest.mark.world_size(2)
def test_experts_of_transformers(stage, experts):
    """Mixtral, whose experts are slices of one parameter."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def mixtral():
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
                experts_implementation=experts,
            )
        )  # fmt: skip

    def loss(model, step, rank):
        tokens = torch.randint(11, (1, 3), generator=torch.Generator().manual_seed(10 * step + rank))
        return model(input_ids=tokens, labels=tokens).loss

    engine, model = engine_of(build(mixtral), stage), build(mixtral)
    optimizer = adamw(model)
    for step in range(2):
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)
