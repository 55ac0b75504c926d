"""Curvature over sharded trees equals dense matrices of the mean loss over all ranks' data, and curvlinops."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerofunc
from reference import EVERY_STAGE, STAGES, Language, Net, build
from zerofunc import curvature

NUM_SAMPLES = 8


class Case:
    """A sharded model and its plain twin, with all ranks' data and this rank's part of them."""

    def __init__(self, stage, sizes=None, make=Net):
        self.plain = build(make)
        self.module = zerofunc.shard(copy.deepcopy(self.plain), stage, page_bytes=160, resident_bytes=0, timeout_s=20)
        generator = torch.Generator().manual_seed(5)
        num = sum(sizes) if sizes else NUM_SAMPLES
        self.inputs = torch.randn(num, 4, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(0, 3, (num,), generator=generator)
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        sizes = (
            sizes
            if sizes and len(sizes) == world
            else [num // world] * (world - 1) + [num - num // world * (world - 1)]
        )
        self.mine = [part.split(sizes)[rank] for part in (self.inputs, self.targets)]

    # -- sharded

    def output(self, shards):
        return zerofunc.functional_call(self.module, shards, (self.mine[0],))

    def loss_of_output(self, output):
        return F.cross_entropy(output, self.mine[1])

    def loss(self, shards):
        return self.loss_of_output(self.output(shards))

    def hvp(self, direction):
        return curvature.hvp(self.loss, self.module, direction)

    def ggnvp(self, direction):
        return curvature.ggnvp(self.output, self.loss_of_output, self.module, direction)

    # -- dense

    def parameters(self):
        return {name: parameter.detach() for name, parameter in self.plain.named_parameters()}

    def matrices(self, parameters=None):
        """Hessian and Gauss-Newton matrix of the mean loss, [P, P]."""
        parameters = parameters or self.parameters()

        def outputs(p):
            return torch.func.functional_call(self.plain, p, (self.inputs,))

        def mean_loss(p):
            return F.cross_entropy(outputs(p), self.targets)

        blocks = torch.func.hessian(mean_loss)(parameters)
        rows = [[blocks[a][b].reshape(parameters[a].numel(), -1) for b in parameters] for a in parameters]
        jacobian = torch.func.jacrev(outputs)(parameters)
        flat = torch.cat([jacobian[name].flatten(2) for name in parameters], 2).flatten(0, 1)
        middle = torch.func.hessian(lambda y: F.cross_entropy(y, self.targets))(outputs(parameters))
        return torch.cat([torch.cat(row, 1) for row in rows]), flat.mT @ middle.reshape(len(flat), -1) @ flat

    def full(self, tree):
        """A sharded tree as one vector, the same on all ranks."""
        return torch.cat([part.flatten() for part in zerofunc.unshard(self.module, tree).values()])

    def tree(self, vector):
        """The sharded tree of a vector."""
        parameters = self.parameters()
        pieces = vector.split([p.numel() for p in parameters.values()])
        full = {name: piece.view_as(parameters[name]) for name, piece in zip(parameters, pieces, strict=True)}
        return zerofunc.reshard(self.module, full)

    def probe(self, seed, kind):
        """The random vector of a seed, as one rank alone draws it."""
        drawn = zerofunc.draw(self.module, seed, kind)
        return self.full(drawn)


def close(found, expected, rtol=1e-9, atol=1e-11):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def probe_seed(seed, index):
    return (seed << 32) + index


# -- products


@pytest.mark.world_size(1, 2)
@EVERY_STAGE
def test_products_equal_dense_matrices(stage):
    case = Case(stage)
    directions = [zerofunc.draw(case.module, seed) for seed in range(3)]
    stacked = {name: torch.stack([d[name] for d in directions]) for name in directions[0]}
    for product, matrix in zip((case.hvp, case.ggnvp), case.matrices(), strict=True):
        expected = [matrix @ case.full(direction) for direction in directions]
        close(case.full(product(directions[0])), expected[0])
        many = product(stacked)
        for i in range(3):
            close(case.full({name: part[i] for name, part in many.items()}), expected[i])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_products_at_another_point_and_in_chunks(stage):
    case = Case(stage)
    direction = zerofunc.draw(case.module, 0)
    at = {name: shard.detach() + 0.1 for name, shard in zerofunc.shards(case.module).items()}
    hessian, gauss_newton = case.matrices({name: p + 0.1 for name, p in case.parameters().items()})
    close(case.full(curvature.hvp(case.loss, case.module, direction, at)), hessian @ case.full(direction))
    product = curvature.ggnvp(case.output, case.loss_of_output, case.module, direction, at)
    close(case.full(product), gauss_newton @ case.full(direction))
    stacked = {name: torch.stack([part, -part, 2 * part]) for name, part in direction.items()}
    many = curvature.hvp(case.loss, case.module, stacked, at, chunk_size=2)
    close(case.full({name: part[2] for name, part in many.items()}), 2 * hessian @ case.full(direction))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_may_contain_gradients_and_a_product_be_differentiated(stage):
    """The gradient is not reduced where its tangent alone is wanted; here it is wanted."""
    case = Case(stage)
    direction = zerofunc.draw(case.module, 0)

    def after_a_step(loss):
        return lambda p: loss({name: p[name] - 0.5 * g for name, g in torch.func.grad(loss)(p).items()})

    def mean_loss(p):
        return F.cross_entropy(torch.func.functional_call(case.plain, p, (case.inputs,)), case.targets)

    def curve(p):
        return torch.func.jvp(lambda q: torch.func.jvp(mean_loss, (q,), (full,))[1], (p,), (full,))[1]

    full = zerofunc.unshard(case.module, direction)
    expected = torch.func.jvp(torch.func.grad(after_a_step(mean_loss)), (case.parameters(),), (full,))[1]
    found = curvature.hvp(after_a_step(case.loss), case.module, direction)
    close(zerofunc.unshard(case.module, found), expected)

    def sharded_curve(at):
        return zerofunc.vdot(curvature.hvp(case.loss, case.module, direction, at), direction, case.module)

    third = torch.func.grad(sharded_curve)({n: s.detach() for n, s in zerofunc.shards(case.module).items()})
    close(zerofunc.unshard(case.module, third), torch.func.grad(curve)(case.parameters()))


@pytest.mark.world_size(2)
def test_frozen_parameters_have_no_curvature():
    plain = build(Net)
    plain.middle.requires_grad_(False)
    module = zerofunc.shard(plain, 3, page_bytes=160)
    loss = lambda s: zerofunc.functional_call(module, s, (torch.ones(2, 4).double(),)).square().mean()  # noqa: E731
    product = curvature.hvp(loss, module, zerofunc.draw(module, 0))
    assert product.keys() == zerofunc.shards(module).keys() and "middle.weight" not in product


# -- Fisher


def squared_gradients(plain, loss, *samples):
    """The mean of squared per-sample gradients, one sample after the other."""
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for sample in zip(*samples, strict=True):
        for square, gradient in zip(total, torch.autograd.grad(loss(plain, *sample), plain.parameters()), strict=True):
            square += gradient.square() / len(samples[0])
    return torch.cat([square.flatten() for square in total])


def cross_entropy(model, x, target):
    return F.cross_entropy(model(x), target)


@pytest.mark.world_size(1, 2)
@STAGES
def test_empirical_fisher_equals_one_sample_at_a_time(stage):
    case = Case(stage, sizes=[6, 1])
    expected = squared_gradients(case.plain, cross_entropy, case.inputs, case.targets)
    for chunk_size in (None, 2):
        found = curvature.fisher_diagonal(cross_entropy, case.module, case.mine, chunk_size=chunk_size)
        close(case.full(found), expected)


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_used_several_times_is_squared_once(stage):
    def loss(model, tokens):
        logits = model(tokens[None]) + model(tokens.flip(0)[None])
        return F.cross_entropy(logits[0, :-1], tokens[1:])

    case = Case(stage, make=Language)
    tokens = torch.arange(4)[:, None] * torch.tensor([1, 2, 3]) % 7
    found = curvature.fisher_diagonal(loss, case.module, [tokens.tensor_split(dist_size())[dist_rank()]])
    close(case.full(found), squared_gradients(case.plain, loss, tokens))


def dist_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def dist_rank():
    return dist.get_rank() if dist.is_initialized() else 0


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_true_fisher_draws_the_same_targets_at_any_world_size(likelihood):
    def loss_of_draw(model, x, noise):
        output = model(x)
        if likelihood == "gaussian":
            return 0.5 * (output - (output.detach() + noise)).square().sum()
        return F.cross_entropy(output, (output.detach() + noise).argmax())

    case = Case(3)
    found = curvature.fisher_diagonal(
        lambda model, x: model(x), case.module, case.mine[:1], likelihood=likelihood, num_draws=2, seed=3, chunk_size=3
    )
    expected = 0
    for turn in range(2):
        generators = [np.random.default_rng([3, turn, i]) for i in range(NUM_SAMPLES)]
        noise = [g.gumbel(size=3) if likelihood == "categorical" else g.standard_normal(3) for g in generators]
        expected = (
            expected + squared_gradients(case.plain, loss_of_draw, case.inputs, torch.tensor(np.array(noise))) / 2
        )
    close(case.full(found), expected)


def test_true_fisher_is_the_gauss_newton_matrix_of_the_likelihood():
    case = Case(0)
    inputs = case.inputs.repeat(300, 1)  # as many draws of each
    found = curvature.fisher_diagonal(lambda model, x: model(x), case.module, [inputs], likelihood="categorical")
    expected = case.matrices()[1].diag()
    assert (case.full(found) - expected).norm() < 0.1 * expected.norm()


# -- estimates


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize(("stage", "chunk_size"), [(0, 1), (3, 3)])
def test_hutchinson_estimates_equal_those_of_the_dense_matrix(stage, chunk_size):
    case, num = Case(stage), 4
    hessian = case.matrices()[0]
    probes = torch.stack([case.probe(probe_seed(7, i), "rademacher") for i in range(num)])
    samples = probes * (probes @ hessian)
    trace = curvature.hutchinson_trace(case.hvp, case.module, num, seed=7, chunk_size=chunk_size)
    close(trace.value, samples.sum(1).mean())
    close(trace.standard_error, samples.sum(1).std() / num**0.5)
    diagonal = curvature.hutchinson_diagonal(case.hvp, case.module, num, seed=7, chunk_size=chunk_size)
    close(case.full(diagonal.value), samples.mean(0))
    close(case.full(diagonal.standard_error), samples.std(0) / num**0.5, atol=1e-8)


def test_standard_errors_tell_how_far_the_estimate_is():
    case = Case(0)
    matrix = case.matrices()[1]
    trace = curvature.hutchinson_trace(case.ggnvp, case.module, 100, chunk_size=50)
    assert abs(trace.value - matrix.trace()) < 4 * trace.standard_error < matrix.trace()
    diagonal = curvature.hutchinson_diagonal(case.ggnvp, case.module, 100, chunk_size=50)
    errors = (case.full(diagonal.value) - matrix.diag()) / case.full(diagonal.standard_error)
    assert 0.7 < errors.square().mean().sqrt() < 1.4
    assert curvature.hutchinson_trace(case.ggnvp, case.module, 1).standard_error.isnan()
    assert float(trace) == trace.value.item()


@pytest.mark.world_size(1, 2)
def test_lanczos_finds_the_spectrum():
    case = Case(3)
    hessian = case.matrices()[0]
    expected = torch.linalg.eigvalsh(hessian).flip(0)
    found = curvature.lanczos(case.hvp, case.module, 30, num_eigenvectors=2)
    close(found.eigenvalues[:3], expected[:3])
    close(found.eigenvalues[-1:], expected[-1:])
    close(found.weights.sum(), torch.tensor(1.0).double())
    for i in range(2):
        vector = case.full({name: part[i] for name, part in found.eigenvectors.items()})
        close(hessian @ vector, expected[i] * vector, atol=1e-8)
    few = curvature.lanczos(case.hvp, case.module, 8)
    distances = (few.eigenvalues[:, None] - expected).abs().min(1).values
    assert (distances <= few.error_bounds + 1e-12).all() and few.error_bounds.max() > 1e-3
    again = curvature.lanczos(case.hvp, case.module, 8, reorthogonalise=False)
    close(again.tridiagonal, few.tridiagonal, rtol=1e-6)


@pytest.mark.world_size(1, 2)
def test_lanczos_ends_where_the_krylov_space_does():
    case = Case(3)
    found = curvature.lanczos(lambda v: {name: 2 * part for name, part in v.items()}, case.module, 5)
    close(found.tridiagonal, torch.full((1, 1), 2.0).double())
    assert found.error_bounds.max() < 1e-12


@pytest.mark.slow
@pytest.mark.world_size(1, 2)
def test_spectral_density_is_the_smoothed_spectrum_seen_by_the_probes():
    case = Case(3)
    values, vectors = torch.linalg.eigh(case.matrices()[1])
    found = curvature.spectral_density(case.ggnvp, case.module, 30, num_probes=2, seed=1, width=0.05, num_points=50)
    probes = torch.stack([case.probe(probe_seed(1, i), "rademacher") for i in range(2)])
    shares = (probes @ vectors).square().mean(0) / len(values)
    bells = torch.distributions.Normal(values, 0.05).log_prob(found.grid[:, None]).exp()
    close(found.density, bells @ shares, rtol=1e-7)
    close(torch.trapezoid(found.density, found.grid), torch.tensor(1.0).double(), rtol=1e-3)
    trace = curvature.hutchinson_trace(case.ggnvp, case.module, 2, seed=1)
    close(len(values) * (found.weights * found.nodes).sum(), trace.value)


@pytest.mark.world_size(1, 2)
def test_conjugate_gradients_solve_the_damped_system():
    case = Case(3)
    gauss_newton = case.matrices()[1]
    b = zerofunc.draw(case.module, 2)
    seen = []
    found = curvature.conjugate_gradient(
        case.ggnvp,
        b,
        case.module,
        damping=0.1,
        tolerance=1e-10,
        callback=lambda step, residual: seen.append((step, residual)),
    )
    damped = gauss_newton + 0.1 * torch.eye(len(gauss_newton)).double()
    assert found.converged and found.outcome == "converged"
    assert [residual for _, residual in seen] == found.residuals[1:] and found.residuals[-1] <= 1e-10
    close(case.full(found.solution), torch.linalg.solve(damped, case.full(b)), rtol=1e-7, atol=1e-8)
    left = case.full(b) - damped @ case.full(found.solution)
    assert left.norm() <= 2e-10 * case.full(b).norm()
    short = curvature.conjugate_gradient(case.ggnvp, b, case.module, damping=0.1, max_steps=2)
    assert short.outcome == "max_steps" and not short.converged and len(short.residuals) == 3


@pytest.mark.world_size(1, 2)
def test_conjugate_gradients_stop_at_negative_curvature_and_at_zero():
    case = Case(3)
    values, vectors = torch.linalg.eigh(case.matrices()[0])
    assert values[0] < 0
    found = curvature.conjugate_gradient(case.hvp, case.tree(vectors[:, 0] + vectors[:, -1] / 2), case.module)
    assert found.outcome == "negative curvature" and not found.converged
    nothing = curvature.conjugate_gradient(case.hvp, case.tree(0 * vectors[:, 0]), case.module)
    assert nothing.converged and nothing.residuals == [0.0] and not case.full(nothing.solution).any()


# -- curvlinops


@pytest.mark.slow  # for its imports
@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_products_and_fisher_equal_curvlinops(stage):
    import curvlinops

    case = Case(stage)
    setting = (case.plain, nn.CrossEntropyLoss(), list(case.plain.parameters()), [(case.inputs, case.targets)])
    direction = zerofunc.draw(case.module, 1)
    for operator, product in ((curvlinops.HessianLinearOperator, case.hvp), (curvlinops.GGNLinearOperator, case.ggnvp)):
        close(case.full(product(direction)), operator(*setting, check_deterministic=False) @ case.full(direction))
    empirical = curvlinops.EFLinearOperator(*setting, check_deterministic=False)
    found = curvature.fisher_diagonal(cross_entropy, case.module, case.mine)
    close(case.full(found), (empirical @ torch.eye(empirical.shape[0]).double()).diag())


@pytest.mark.slow  # for its imports
@pytest.mark.world_size(2)
def test_estimates_equal_curvlinops_with_the_same_probes(monkeypatch):
    import curvlinops
    from curvlinops.papyan2020traces import spectrum
    from curvlinops.trace import hutchinson

    case = Case(3)
    setting = (case.plain, nn.CrossEntropyLoss(), list(case.plain.parameters()), [(case.inputs, case.targets)])
    hessian = curvlinops.HessianLinearOperator(*setting, check_deterministic=False)
    probes = [case.probe(probe_seed(0, i), "rademacher") for i in range(3)]
    monkeypatch.setattr(spectrum, "randn", lambda *_, **__: probes[0].clone())
    values, vectors = spectrum.fast_lanczos(hessian, 6)
    density = curvature.spectral_density(case.hvp, case.module, 6)
    close(density.nodes, values.flip(0), rtol=1e-8)
    close(density.weights, vectors[0].square().flip(0), rtol=1e-7)
    remaining = iter(probes)
    monkeypatch.setattr(hutchinson, "random_vector", lambda *_: next(remaining))
    close(curvature.hutchinson_trace(case.hvp, case.module, 3).value, hutchinson.hutchinson_trace(hessian, 3))


# -- bad input


@pytest.mark.world_size(2)
def test_bad_input_is_refused_on_every_rank():
    case = Case(3)
    module, direction = case.module, zerofunc.draw(case.module, 0)

    def never(_):
        raise AssertionError("the product was called")

    uneven = {**direction, "head.bias": direction["head.bias"][: 1 + dist.get_rank() * 10]}  # wrong on one rank alone
    wrong = [
        ("differs in", lambda: case.hvp({name: direction[name] for name in list(direction)[1:]})),
        ("head.bias|another rank", lambda: case.hvp(uneven)),
        ("float32", lambda: case.ggnvp({name: part.float() for name, part in direction.items()})),
        ("leading dimensions", lambda: case.hvp({**direction, "head.bias": direction["head.bias"][None]})),
        ("scalar tensor", lambda: curvature.hvp(case.output, module, direction)),
        ("scalar tensor", lambda: curvature.ggnvp(case.output, lambda y: y, module, direction)),
        ("scalar tensor", lambda: curvature.fisher_diagonal(lambda m, x: m(x), module, case.mine[:1])),
        ("lengths", lambda: curvature.fisher_diagonal(cross_entropy, module, [case.mine[0], case.mine[1][:1]])),
        ("likelihood", lambda: curvature.fisher_diagonal(never, module, case.mine, likelihood="poisson")),
        ("num_draws", lambda: curvature.fisher_diagonal(never, module, case.mine, num_draws=2)),
        ("chunk_size", lambda: curvature.fisher_diagonal(never, module, case.mine, chunk_size=0)),
        ("num_samples", lambda: curvature.hutchinson_trace(never, module, 0)),
        ("chunk_size", lambda: curvature.hutchinson_diagonal(never, module, 1, chunk_size=0)),
        ("the product", lambda: curvature.hutchinson_trace(lambda v: {}, module, 1)),
        ("num_steps", lambda: curvature.lanczos(never, module, 0)),
        ("reorthogonalise", lambda: curvature.lanczos(never, module, 3, num_eigenvectors=1, reorthogonalise=False)),
        ("width", lambda: curvature.spectral_density(never, module, 3, width=0.0)),
        ("the product", lambda: curvature.lanczos(lambda v: {}, module, 1)),
        ("damping", lambda: curvature.conjugate_gradient(never, direction, module, damping=-1.0)),
        ("b should be", lambda: curvature.conjugate_gradient(never, {}, module)),
        ("not sharded", lambda: curvature.hvp(never, case.plain, direction)),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(FloatingPointError, match="finite"):
        curvature.lanczos(lambda v: {name: part / 0 for name, part in v.items()}, module, 2)
    close(case.full(case.hvp(direction)), case.matrices()[0] @ case.full(direction))  # and it still works


@pytest.mark.world_size(2)
@EVERY_STAGE
def test_a_product_reduces_no_gradient_that_nobody_asked_for(stage):
    case = Case(stage)
    where = zerofunc.shards(case.module)
    direction = {name: torch.ones_like(part) for name, part in where.items()}

    def reductions(run):
        before = case.module.__dict__["_zerofunc"].axes.moved_bytes
        result = run()
        return result, case.module.__dict__["_zerofunc"].axes.moved_bytes - before

    detached = {name: part.detach() for name, part in where.items()}
    (_, expected), with_gradient = reductions(
        lambda: torch.func.jvp(torch.func.grad(case.loss), (detached,), (direction,))
    )
    product, alone = reductions(lambda: case.hvp(direction))
    torch.testing.assert_close(product, expected)
    assert alone < with_gradient


@pytest.mark.world_size(2)
@STAGES
def test_a_product_may_be_pulled_back_at_the_level_at_which_it_was_made(stage):
    case = Case(stage)
    where = {name: part.detach() for name, part in zerofunc.shards(case.module).items()}
    direction = {name: torch.ones_like(part) for name, part in where.items()}

    def product(shards):
        return curvature.hvp(case.loss, case.module, direction, at=shards)

    _, pull = torch.func.vjp(product, where)
    plain = pull(direction)[0]
    zero = torch.zeros((), dtype=torch.float64)

    def pulled(factor):
        return pull({name: part * (1 + factor) for name, part in direction.items()})[0]

    def twice(factor):
        return torch.func.jvp(pulled, (factor,), (torch.ones_like(factor),))[0]

    nested = torch.func.jvp(twice, (zero,), (torch.ones_like(zero),))[0]
    torch.testing.assert_close(nested, plain)
