"""A potential trains on energies, forces and stresses at every stage as plain PyTorch does."""

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, vmap

from reference import STAGES, adamw, assert_same, assert_same_gradients, build, data, engine_of, mean_over_ranks
from zoo import atoms


def schnet():
    return atoms.schnet()[0]


def tensor_products():
    from zoo import equivariant

    return equivariant.tensor_products()[0]


def deformed(model, positions, strain):
    """Energies [batch, 1] of positions [batch, atoms, 3] under a symmetric strain [batch, 3, 3]."""
    return model(positions + positions @ (strain + strain.mT) / 2)


def by_autograd(model, positions, strain):
    positions, strain = positions.clone().requires_grad_(), strain.clone().requires_grad_()
    energy = deformed(model, positions, strain)
    return energy, *torch.autograd.grad(energy.sum(), (positions, strain), create_graph=True)


def by_func_grad(model, positions, strain):
    slopes = grad(lambda p, s: deformed(model, p, s).sum(), argnums=(0, 1))(positions, strain)
    return deformed(model, positions, strain), *slopes


def by_sample(model, positions, strain):
    def energy(p, s):
        return deformed(model, p[None], s[None]).sum()

    return deformed(model, positions, strain), *vmap(grad(energy, argnums=(0, 1)))(positions, strain)


WAYS = [by_autograd, by_func_grad, by_sample]


def fit(way):
    """The loss of one rank: energies, forces (minus the slope in the positions) and stresses, each against a target."""

    def loss(model, step, rank):
        positions = atoms.CORNERS.double() + 0.1 * data(step, rank, 2, 4, 3)
        energy, slope, stress = way(model, positions, torch.zeros(2, 3, 3, dtype=positions.dtype))
        target = data(step, rank + 100, 2, 4, 3)
        return energy.square().mean() + (-slope - target).square().mean() + (stress - target[:, :3]).square().mean()

    return loss


def trains_alike(make, stage):
    engine, model = engine_of(build(make), stage), build(make)
    optimizer = adamw(model)
    for step, way in enumerate(WAYS):
        engine.backward(fit(way)(engine, step, dist.get_rank()))
        optimizer.zero_grad()
        mean_over_ranks(fit(way), model, step).backward()
        assert_same_gradients(engine.module, model)
        engine.step()
        optimizer.step()
        assert_same(engine, model)


@pytest.mark.world_size(2)
@STAGES
def test_a_potential_trains_on_energy_forces_and_stress(stage):
    trains_alike(schnet, stage)


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.world_size(1, 2)
@STAGES
def test_an_equivariant_potential_trains_on_energy_forces_and_stress(stage):
    trains_alike(tensor_products, stage)


@pytest.mark.parametrize("way", WAYS)
def test_plain_pytorch_differentiates_forces_and_stress_rightly(way):
    model, step = build(schnet), 1e-5
    loss = fit(way)
    loss(model, 0, 0).backward()
    directions = {parameter: torch.randn_like(parameter) for parameter in model.parameters()}
    claimed = sum((parameter.grad * directions[parameter]).sum() for parameter in directions)

    def moved(size):
        with torch.no_grad():
            for parameter, direction in directions.items():
                parameter.add_(size * direction)
        return loss(model, 0, 0).detach()

    difference = (moved(step) - moved(-2 * step)) / (2 * step)
    torch.testing.assert_close(claimed, difference, rtol=1e-6, atol=0)
