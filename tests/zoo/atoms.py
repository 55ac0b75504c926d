"""Graphs and atoms on plain torch, in the manner of torch_geometric."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo.numerics import Called

NODES = 4
SOURCE, TARGET = torch.tensor([[0, 1, 1, 2, 3, 0], [1, 0, 2, 3, 1, 3]])
PAIRS = torch.tensor(list(itertools.permutations(range(NODES), 2))).T


def summed(messages, target):
    """Sum of the messages [batch, edges, dim] that reach each node: [batch, nodes, dim]."""
    return messages.new_zeros(len(messages), NODES, messages.shape[-1]).index_add(1, target, messages)


class Convolution(nn.Module):
    """Messages of source and target through an MLP, added up by scatter and averaged."""

    def __init__(self, dim, out):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * dim, out), nn.SiLU(), nn.Linear(out, out))
        self.own = nn.Linear(dim, out)

    def forward(self, x):
        messages = self.message(torch.cat([x[:, SOURCE], x[:, TARGET]], -1))
        place = TARGET[:, None].expand(messages.shape)
        degree = torch.zeros(NODES, dtype=x.dtype).scatter_add(0, TARGET, torch.ones(len(TARGET), dtype=x.dtype))
        added = messages.new_zeros(len(x), NODES, messages.shape[-1]).scatter_add(1, place, messages)
        return F.silu(self.own(x) + added / degree.clamp(min=1)[:, None])


class GraphAttention(nn.Module):
    """Messages weighted by a softmax over each node's incoming edges."""

    def __init__(self, dim, out):
        super().__init__()
        self.project, self.score = nn.Linear(dim, out), nn.Linear(2 * out, 1)

    def forward(self, x):
        x = self.project(x)
        source, target = x.index_select(1, SOURCE), x.index_select(1, TARGET)
        weights = torch.exp(F.leaky_relu(self.score(torch.cat([source, target], -1)), 0.2))
        return F.elu(x + summed(weights * source, TARGET) / (summed(weights, TARGET) + 1e-3))


def read_out(layers, x):
    return layers(x).mean(1)


def graph_convolution():
    layers = nn.Sequential(Convolution(3, 5), Convolution(5, 5), nn.Linear(5, 2))
    return Called(layers, read_out), torch.randn(2, NODES, 3)


def graph_attention():
    layers = nn.Sequential(GraphAttention(3, 5), GraphAttention(5, 4), nn.Linear(4, 2))
    return Called(layers, read_out), torch.randn(2, NODES, 3)


class ShiftedSoftplus(nn.Module):
    def forward(self, x):
        return F.softplus(x) - math.log(2)


class SchNet(nn.Module):
    """The energy of atoms from smooth functions of their distances.

    Continuous-filter convolutions of K. T. Schütt et al., SchNet (2017), without a cutoff.
    """

    def __init__(self, dim=6, num_radial=4, num_layers=2):
        super().__init__()
        self.embed = nn.Embedding(3, dim)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(num_radial, dim), ShiftedSoftplus(), nn.Linear(dim, dim)) for _ in range(num_layers)
        )
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), ShiftedSoftplus(), nn.Linear(dim, dim)) for _ in range(num_layers)
        )
        self.energy = nn.Sequential(nn.Linear(dim, dim), ShiftedSoftplus(), nn.Linear(dim, 1))
        self.register_buffer("species", torch.tensor([0, 1, 2, 1]))
        self.register_buffer("centres", torch.linspace(0.5, 3.0, num_radial))

    def forward(self, positions):
        """[batch, atoms, 3] to energies per atom [batch, 1]."""
        source, target = PAIRS
        distances = (positions[:, source] - positions[:, target]).square().sum(-1, keepdim=True).sqrt()
        radial = torch.exp(-2 * (distances - self.centres).square())
        h = self.embed(self.species).expand(len(positions), -1, -1)
        for filters, mix in zip(self.filters, self.mixers, strict=True):
            h = h + mix(summed(h[:, source] * filters(radial), target))
        return self.energy(h).mean(1)


CORNERS = torch.tensor([[0.0, 0, 0], [1.5, 0, 0], [0, 1.5, 0], [0, 0, 1.5]])


def molecules():
    """Four atoms, none near another: [2, 4, 3]."""
    return CORNERS + 0.1 * torch.randn(2, NODES, 3)


def energy(model, positions):
    return model(positions)


def schnet():
    return Called(SchNet(), energy), molecules()
