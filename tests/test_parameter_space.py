"""Derivatives over shards equal those of the mean loss over all ranks' data, over full parameters in one process."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import zerofunc
from reference import EVERY_STAGE, STAGES, Language, Net, build, data, engine_of


def num_ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def score(y, x):
    return (y - x[:, :3].sin()).square().mean() + y.pow(3).mean()


class Pair:
    """A sharded module with this rank's loss over shards, and the plain one with the mean loss over parameters."""

    def __init__(self, stage, **options):
        self.model, self.plain = build(Net), build(Net)
        options = {"page_bytes": 160, "resident_bytes": 0, "timeout_s": 20, **options}
        zerofunc.shard(self.model, stage, **options)
        self.shards = zerofunc.shards(self.model)
        self.parameters = {name: p.detach() for name, p in self.plain.named_parameters()}
        self.x, self.everyones = data(0, rank()), [data(0, r) for r in range(num_ranks())]

    def outputs(self, shards):
        return zerofunc.functional_call(self.model, shards, (self.x,))

    def loss(self, shards):
        return score(self.outputs(shards), self.x)

    def local(self, parameters, x):
        return score(functional_call(self.plain, parameters, (x,)), x)

    def mean(self, parameters):
        return torch.stack([self.local(parameters, x) for x in self.everyones]).mean()

    def draw(self, seed):
        """A direction, as a sharded tree and in full."""
        direction = zerofunc.draw(self.model, seed)
        return direction, zerofunc.unshard(self.model, direction)

    def inner(self, a, b):
        return zerofunc.vdot(a, b, self.model)

    def assert_same(self, tree, full):
        found = zerofunc.unshard(self.model, {name: part.detach() for name, part in tree.items()})
        torch.testing.assert_close(found, {name: full[name].detach() for name in found}, rtol=1e-9, atol=1e-12)


def dot(a, b):
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def rows(tree, index):
    return {name: value[index] for name, value in tree.items()}


@pytest.mark.world_size(1, 2)
@EVERY_STAGE
def test_first_order(stage):
    pair = Pair(stage)
    v, full = pair.draw(1)
    expected = grad(pair.mean)(pair.parameters)
    pair.assert_same(grad(pair.loss)(pair.shards), expected)
    gradient, value = grad_and_value(pair.loss)(pair.shards)
    pair.assert_same(gradient, expected)
    torch.testing.assert_close(value, pair.local(pair.parameters, pair.x))
    pair.assert_same(
        vjp(pair.loss, pair.shards)[1](torch.tensor(2.0).double())[0], {n: 2 * g for n, g in expected.items()}
    )
    value, tangent = jvp(pair.loss, (pair.shards,), (v,))
    here = jvp(lambda p: pair.local(p, pair.x), (pair.parameters,), (full,))[1]
    torch.testing.assert_close(tangent, here, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(zerofunc.mean(tangent, pair.model), dot(expected, full), rtol=1e-9, atol=1e-12)


@pytest.mark.world_size(1, 2)
@EVERY_STAGE
def test_hessian_products_in_every_order_and_third_order(stage):
    pair = Pair(stage)
    v, full = pair.draw(1)
    loss, shards = pair.loss, pair.shards
    expected = jvp(grad(pair.mean), (pair.parameters,), (full,))[1]
    pair.assert_same(jvp(grad(loss), (shards,), (v,))[1], expected)
    pair.assert_same(grad(lambda s: jvp(loss, (s,), (v,))[1])(shards), expected)
    pair.assert_same(grad(lambda s: pair.inner(grad(loss)(s), v))(shards), expected)
    pair.assert_same(grad(lambda s: dot(grad(loss)(s), v))(shards), expected)  # the sum over ranks is implied

    def curvature(p, f, direction):
        return jvp(grad(f), (p,), (direction,))[1]

    third = grad(lambda p: dot(curvature(p, pair.mean, full), full))(pair.parameters)
    pair.assert_same(grad(lambda s: pair.inner(curvature(s, loss, v), v))(shards), third)
    pair.assert_same(jvp(lambda s: curvature(s, loss, v), (shards,), (v,))[1], third)


@pytest.mark.world_size(2)
@STAGES
def test_vmap_over_directions_and_over_an_ensemble(stage):
    pair = Pair(stage)
    drawn = [pair.draw(seed) for seed in range(3)]
    directions = {name: torch.stack([v[name] for v, _ in drawn]) for name in pair.shards}
    products = vmap(lambda v: jvp(grad(pair.loss), (pair.shards,), (v,))[1])(directions)
    ensemble = {name: pair.shards[name].detach() + 0.1 * directions[name] for name in pair.shards}
    gradients = vmap(grad(pair.loss))(ensemble)
    values = vmap(pair.outputs)(ensemble)
    nested = vmap(lambda s: vmap(lambda v: jvp(pair.loss, (s,), (v,))[1])(directions))(ensemble)
    for i, (_, full) in enumerate(drawn):
        pair.assert_same(rows(products, i), jvp(grad(pair.mean), (pair.parameters,), (full,))[1])
        member = {name: pair.parameters[name] + 0.1 * full[name] for name in full}
        pair.assert_same(rows(gradients, i), grad(pair.mean)(member))
        torch.testing.assert_close(values[i], functional_call(pair.plain, member, (pair.x,)))
        slope = grad(lambda p: pair.local(p, pair.x))(member)
        torch.testing.assert_close(nested[i], torch.stack([dot(slope, f) for _, f in drawn]), rtol=1e-9, atol=1e-12)


@pytest.mark.world_size(2)
@STAGES
def test_jacobians_of_small_outputs(stage):
    pair = Pair(stage)
    expected = jacrev(
        lambda p: torch.stack([functional_call(pair.plain, p, (x,)).mean(0) for x in pair.everyones]).mean(0)
    )
    expected = expected(pair.parameters)

    def outputs(shards):
        return pair.outputs(shards).mean(0)

    reverse = jacrev(outputs)(pair.shards)
    forward = zerofunc.jacfwd(outputs, pair.model, chunk_size=9)(pair.shards)
    for i in range(3):
        pair.assert_same(rows(reverse, i), rows(expected, i))
        pair.assert_same(rows(forward, i), rows(expected, i))


@pytest.mark.world_size(2)
@STAGES
def test_learning_to_learn(stage):
    """An outer gradient through inner SGD steps and through a step of Adam, all over shards."""
    pair = Pair(stage)

    def descended(f, tree):
        for _ in range(2):
            gradient = grad(f)(tree)
            tree = {name: tree[name] - 0.1 * gradient[name] for name in tree}
        gradient = grad(f)(tree)
        return {name: tree[name] - 0.01 * g / (g.square().sqrt() + 1e-3) for name, g in gradient.items()}

    found = grad(lambda s: pair.loss(descended(pair.loss, s)))(pair.shards)
    pair.assert_same(found, grad(lambda p: pair.mean(descended(pair.mean, p)))(pair.parameters))


@pytest.mark.world_size(2)
@STAGES
def test_backward_through_functional_call_fills_the_gradients_of_the_shards(stage):
    pair = Pair(stage)
    loss = pair.loss(pair.shards) + dot(grad(pair.loss)(pair.shards), pair.draw(1)[0])
    loss.backward()
    full = pair.draw(1)[1]
    expected = grad(lambda p: pair.mean(p) + dot(grad(pair.mean)(p), full))(pair.parameters)
    pair.assert_same({name: shard.grad for name, shard in pair.shards.items()}, expected)


@pytest.mark.world_size(2)
@STAGES
def test_low_rank_updates_and_replaced_parameters(stage):
    pair = Pair(stage)
    a, b = data(1, 0, 6, 2), data(2, 0, 2, 4)  # the same on every rank
    other = data(3, 0, 3)

    def adapted(factors):
        update = zerofunc.reshard(pair.model, {"first.weight": factors[0] @ factors[1]})
        tree = {name: part.detach() for name, part in pair.shards.items() if name != "head.bias"}
        tree["first.weight"] = tree["first.weight"] + update["first.weight"]
        y = zerofunc.functional_call(pair.model, tree, pair.x, full={"head.bias": factors[2]})
        return score(y, pair.x)

    def reference(factors):
        tree = {**pair.parameters, "head.bias": factors[2]}
        tree["first.weight"] = tree["first.weight"] + factors[0] @ factors[1]
        return pair.mean(tree)

    found = [zerofunc.mean(g, pair.model) for g in grad(adapted)((a, b, other))]  # each rank's own
    torch.testing.assert_close(found, list(grad(reference)((a, b, other))), rtol=1e-9, atol=1e-12)


@pytest.mark.world_size(2)
@STAGES
def test_tied_and_frozen_parameters_and_an_engine(stage):
    engine, plain = engine_of(build(Language), stage), build(Language)
    frozen = build(Language)
    frozen.mix.requires_grad_(False)
    sharded = zerofunc.shard(copy.deepcopy(frozen), stage, page_bytes=100)
    tokens = [torch.arange(6).view(2, 3) + r for r in range(num_ranks())]

    def loss(y):
        return y.square().mean()

    for module, of in ((engine, plain), (sharded, frozen)):
        shards = zerofunc.shards(module)
        found = grad(lambda s, m=module: loss(zerofunc.functional_call(m, s, (tokens[rank()],))))(shards)
        full = {name: p for name, p in of.named_parameters() if p.requires_grad}
        expected = grad(lambda p, m=of: torch.stack([loss(functional_call(m, p, (t,))) for t in tokens]).mean())(full)
        assert list(found) == list(expected)
        torch.testing.assert_close(zerofunc.unshard(module, found), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.world_size(2)
@STAGES
def test_local_derivatives_over_full_parameters_with_plain_tangents(stage):
    pair = Pair(stage)
    named = dict(pair.model.named_parameters())
    _, full = pair.draw(1)

    def here(p):
        return score(functional_call(pair.model, p, (pair.x,)), pair.x)

    def local(p):
        return pair.local(p, pair.x)

    same = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(grad(here)(named), grad(local)(pair.parameters), **same)
    torch.testing.assert_close(jvp(here, (named,), (full,)), jvp(local, (pair.parameters,), (full,)), **same)
    product = jvp(grad(here), (named,), (full,))[1]
    torch.testing.assert_close(product, jvp(grad(local), (pair.parameters,), (full,))[1], **same)

    def kernel(module, p):
        jacobian = vmap(jacrev(lambda q, x: functional_call(module, q, (x[None],))[0, 0]), (None, 0))(p, pair.x)
        flat = torch.cat([j.flatten(1) for j in jacobian.values()], 1)
        return flat @ flat.T

    torch.testing.assert_close(kernel(pair.model, named), kernel(pair.plain, pair.parameters), **same)


@pytest.mark.world_size(2)
def test_memory_stays_at_one_page_and_one_page_of_gradient():
    """A Hessian product at stage 3 never has more than the budget gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]).double()
    page = 64 * 65 * 8
    zerofunc.shard(model, 3, page_bytes=page, resident_bytes=2 * page)
    shards, x = zerofunc.shards(model), data(0, rank(), 4, 64)
    v = zerofunc.draw(model, 0)
    peak = 0
    real = zerofunc.space.transposed._packed

    def packed(*args):
        nonlocal peak
        full = real(*args)
        peak = max(peak, full.nbytes)
        return full

    zerofunc.space.transposed._packed = packed
    try:
        jvp(grad(lambda s: zerofunc.functional_call(model, s, (x,)).square().mean()), (shards,), (v,))
    finally:
        zerofunc.space.transposed._packed = real
    assert zerofunc.usage(model).gathered_peak_bytes <= 2 * page + page  # the budget, and what an operator was reading
    assert peak == page


@pytest.mark.world_size(2)
@STAGES
def test_ranks_may_have_batches_of_different_sizes(stage):
    pair = Pair(stage)
    pair.everyones = [data(0, r, 3 + r, 4) for r in range(num_ranks())]
    pair.x = pair.everyones[rank()]
    v, full = pair.draw(1)
    pair.assert_same(grad(pair.loss)(pair.shards), grad(pair.mean)(pair.parameters))
    product = jvp(grad(pair.loss), (pair.shards,), (v,))[1]
    pair.assert_same(product, jvp(grad(pair.mean), (pair.parameters,), (full,))[1])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_vmap_over_a_collective_needs_equal_sizes(stage):
    pair = Pair(stage, timeout_s=21)
    count = 2 + rank()
    stacked = {name: part.detach().expand(count, -1) for name, part in pair.shards.items()}
    with pytest.raises(zerofunc.DivergenceError, match="over a vmap of 3"):
        vmap(grad(pair.loss))(stacked)


@pytest.mark.world_size(2)
def test_jacfwd_and_hessian_of_torch_would_mix_ranks_and_are_refused():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 4, bias=False)).double()
    zerofunc.shard(model, 3, page_bytes=16)
    x = data(0, rank())

    def loss(shards):
        return zerofunc.functional_call(model, shards, (x,)).square().mean()

    for transform in (jacfwd, hessian):
        with pytest.raises(ValueError, match="Use zerofunc.jacfwd"):
            transform(loss)(zerofunc.shards(model))
    whole = {
        name: torch.eye(12).double().view(12, *shape) for name, shape in (("0.weight", (3, 4)), ("2.weight", (4, 3)))
    }
    blank = {name: torch.zeros_like(rows) for name, rows in whole.items()}
    for name in whole:  # the same basis on all ranks is fine: row i of the Hessian
        tree = {**blank, name: whole[name]}
        basis = [zerofunc.reshard(model, {n: v[i] for n, v in tree.items()}) for i in range(12)]
        stacked = {n: torch.stack([b[n] for b in basis]) for n in tree}
        products = vmap(lambda v: jvp(grad(loss), (zerofunc.shards(model),), (v,))[1])(stacked)
        one = jvp(grad(loss), (zerofunc.shards(model),), (basis[7],))[1]
        torch.testing.assert_close(rows(products, 7), one)
    with pytest.raises(ValueError, match="returns a sharded tree"):
        zerofunc.jacfwd(grad(loss), model)(zerofunc.shards(model))
    with pytest.raises(NotImplementedError, match="cannot be traced"):
        linearize(loss, zerofunc.shards(model))


@pytest.mark.world_size(2)
def test_values_used_before_a_step_are_not_read_after_it():
    for stage in (1, 3):
        pair = Pair(stage)
        optimizer = torch.optim.SGD(pair.shards.values(), lr=0.1)
        loss = pair.loss(pair.shards)
        pair.loss(pair.shards).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="after its shards have changed"):
            loss.backward()


@pytest.mark.world_size(2)
def test_samples_mapped_through_the_mean_get_a_warning():
    pair = Pair(3)

    def loss(shards, x):
        return score(zerofunc.functional_call(pair.model, shards, (x[None],)), x[None])

    with pytest.warns(UserWarning, match="mean over ranks of the gradients of every rank's sample"):
        vmap(grad(loss), (None, 0))(pair.shards, pair.x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vmap(loss, (None, 0))(pair.shards, pair.x)
        grad(lambda s: vmap(loss, (None, 0))(s, pair.x).mean())(pair.shards)


@pytest.mark.world_size(1, 2)
@STAGES
def test_shards_that_do_not_fit_are_refused_on_every_rank(stage):
    pair = Pair(stage)
    shards = {name: part.detach() for name, part in pair.shards.items()}

    def refuses(tree, match, **more):
        with pytest.raises(ValueError, match=match):
            zerofunc.functional_call(pair.model, tree, (pair.x,), **more)

    refuses({**shards, "other": torch.zeros(1)}, "unknown names")
    refuses({n: s for n, s in shards.items() if n != "head.bias"}, "no part of")
    refuses({**shards, "head.weight": shards["head.weight"].float()}, "float32")
    refuses({**shards, "head.weight": torch.zeros(99).double()}, "shard has")
    refuses({**shards, "head.weight": 1.0}, "expected a tensor")
    refuses(shards, "both", full={"head.bias": torch.zeros(3)})
    refuses({n: s for n, s in shards.items() if n != "head.bias"}, "expected", full={"head.bias": torch.zeros(4)})
    refuses(shards, "neither a parameter nor a buffer", full={"nothing": torch.zeros(4)})
    if rank() == 0:
        shards["head.weight"] = torch.zeros(99).double()
    refuses(shards, "shard has" if rank() == 0 else "another rank")
    pair.assert_same(grad(pair.loss)(pair.shards), grad(pair.mean)(pair.parameters))
