"""A potential of e3nn: equivariant under rotations."""

import torch
from e3nn import o3
from e3nn.nn import FullyConnectedNet, Gate
from torch import nn

from zoo.atoms import PAIRS, energy, molecules, summed
from zoo.numerics import Called


class Equivariant(nn.Module):
    """Tensor products of features with spherical harmonics of the edges, gated; an invariant readout."""

    def __init__(self):
        super().__init__()
        self.harmonics = o3.Irreps("1x0e + 1x1o")
        self.gate = gate = Gate("2x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
        self.embed = nn.Embedding(3, 2)
        self.first = o3.FullyConnectedTensorProduct("2x0e", self.harmonics, gate.irreps_in, shared_weights=False)
        self.second = o3.FullyConnectedTensorProduct(gate.irreps_out, self.harmonics, "3x0e", shared_weights=False)
        self.radial = nn.ModuleList(
            FullyConnectedNet([3, 4, product.weight_numel], torch.tanh) for product in (self.first, self.second)
        )
        self.skip = o3.Linear("2x0e", gate.irreps_in)
        self.energy = nn.Linear(3, 1)
        self.register_buffer("species", torch.tensor([0, 1, 2, 1]))
        self.register_buffer("centres", torch.linspace(0.5, 3.0, 3))

    def forward(self, positions):
        """[batch, atoms, 3] to energies per atom [batch, 1]."""
        source, target = PAIRS
        edges = positions[:, source] - positions[:, target]
        directions = o3.spherical_harmonics(self.harmonics, edges, normalize=True, normalization="component")
        radial = torch.exp(-(edges.square().sum(-1, keepdim=True).sqrt() - self.centres).square())
        h = self.embed(self.species).expand(len(positions), -1, -1)
        h = self.gate(self.skip(h) + summed(self.first(h[:, source], directions, self.radial[0](radial)), target))
        h = summed(self.second(h[:, source], directions, self.radial[1](radial)), target)
        return self.energy(torch.tanh(h)).mean(1)


def tensor_products():
    return Called(Equivariant(), energy), molecules()
