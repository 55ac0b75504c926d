"""Operators from elementary ones, for derivatives that PyTorch's own kernels get wrong or lack.

``docs/operators.md`` lists what was found. Each function has the arguments of the PyTorch function that it stands for
and the same result. Where it does not cover an option it returns ``NotImplemented``, and PyTorch's own kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zerofunc.kernels import indexing, layers, losses, matrices, normalizations, recurrent

COMPOSITES: dict[Any, Callable[..., Any]] = {
    torch.native_layer_norm: normalizations.native_layer_norm,
    torch.layer_norm: normalizations.layer_norm,
    torch.group_norm: normalizations.group_norm,
    torch.rms_norm: normalizations.rms_norm,
    torch.batch_norm: normalizations.batch_norm,
    torch.instance_norm: normalizations.instance_norm,
    torch._weight_norm: normalizations.weight_norm,
    torch.softmax: normalizations.softmax,
    torch.special.softmax: normalizations.softmax,
    Tensor.softmax: normalizations.softmax,
    torch.log_softmax: normalizations.log_softmax,
    torch.special.log_softmax: normalizations.log_softmax,
    Tensor.log_softmax: normalizations.log_softmax,
    torch.logsumexp: normalizations.logsumexp,
    torch.special.logsumexp: normalizations.logsumexp,
    Tensor.logsumexp: normalizations.logsumexp,
    torch._C._nn.hardsigmoid: layers.hardsigmoid,
    torch._C._nn.glu: layers.glu,
    torch.rrelu: layers.rrelu,
    torch._C._nn.scaled_dot_product_attention: layers.scaled_dot_product_attention,
    torch.embedding_bag: indexing.embedding_bag,
    torch.scatter_reduce: indexing.scatter_reduce,
    Tensor.scatter_reduce: indexing.scatter_reduce,
    torch.index_reduce: indexing.index_reduce,
    Tensor.index_reduce: indexing.index_reduce,
    torch.segment_reduce: indexing.segment_reduce,
    torch.cdist: losses.cdist,
    torch.pdist: losses.pdist,
    torch._C._nn.mse_loss: losses.mse_loss,
    torch._C._nn.huber_loss: losses.huber_loss,
    torch._C._nn.soft_margin_loss: losses.soft_margin_loss,
    torch._C._nn.multi_margin_loss: losses.multi_margin_loss,
    torch._C._nn.cross_entropy_loss: losses.cross_entropy_loss,
    torch.grid_sampler: layers.grid_sampler,
    torch.linalg.solve: matrices.solve,
    torch.linalg.solve_ex: matrices.solve_ex,
    torch.linalg.tensorsolve: matrices.tensorsolve,
    torch.linalg.det: matrices.det,
    torch.det: matrices.det,
    Tensor.det: matrices.det,
    torch.linalg.slogdet: matrices.slogdet,
    torch.slogdet: matrices.slogdet,
    Tensor.slogdet: matrices.slogdet,
    torch.logdet: matrices.logdet,
    Tensor.logdet: matrices.logdet,
    torch.cholesky_inverse: matrices.cholesky_inverse,
    Tensor.cholesky_inverse: matrices.cholesky_inverse,
    torch.triangular_solve: matrices.triangular_solve,
    torch.linalg.householder_product: matrices.householder_product,
    torch.linalg.eigh: matrices.eigh,
    torch.lstm: recurrent.lstm,
    torch.gru: recurrent.gru,
    torch.rnn_tanh: recurrent.rnn_tanh,
    torch.rnn_relu: recurrent.rnn_relu,
    torch.lstm_cell: recurrent.lstm_cell,
    torch._pack_padded_sequence: recurrent.pack_padded_sequence,
    torch._pad_packed_sequence: recurrent.pad_packed_sequence,
}

PAST_FORWARD_MODE = {
    torch.native_layer_norm, torch.layer_norm, torch.softmax, torch.special.softmax, Tensor.softmax, torch.log_softmax,
    torch.special.log_softmax, Tensor.log_softmax, torch.logsumexp, torch.special.logsumexp, Tensor.logsumexp,
    torch._C._nn.cross_entropy_loss, torch._C._nn.glu,
}  # fmt: skip
"""Those with a fault only where a tangent is differentiated again."""

WITHOUT_VMAP = {
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.rrelu, torch._pack_padded_sequence,
    torch.scatter_reduce, Tensor.scatter_reduce, torch.index_reduce, Tensor.index_reduce, torch.group_norm,
}  # fmt: skip
"""Those that PyTorch cannot even vmap."""

PLAIN_LAYERS = {
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d, nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Flatten,
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
}  # fmt: skip
"""Layers that call none of these and write no buffer."""
