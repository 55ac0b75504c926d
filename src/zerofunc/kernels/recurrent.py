"""LSTM, GRU and RNN from elementary operators: with every derivative, vmap, and packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Sequence[Tensor], bool], State]
"""From the projected input, the state and the recurrent weights to the next state, whose first tensor is the output."""


def _linear(h: Tensor, weights: Sequence[Tensor], has_biases: bool) -> Tensor:
    return F.linear(h, weights[1], weights[3] if has_biases else None)


def _lstm_step(x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool) -> State:
    h, c = state
    i, f, g, o = (x + _linear(h, weights, has_biases)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    has_projection = len(weights) == (5 if has_biases else 3)
    return F.linear(h, weights[-1]) if has_projection else h, c


def _gru_step(x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool) -> State:
    (h,) = state
    xr, xz, xn = x.chunk(3, -1)
    hr, hz, hn = _linear(h, weights, has_biases).chunk(3, -1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + (xz + hz).sigmoid() * (h - n),)


def _tanh_step(x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool) -> State:
    return ((x + _linear(state[0], weights, has_biases)).tanh(),)


def _relu_step(x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool) -> State:
    return ((x + _linear(state[0], weights, has_biases)).relu(),)


def _run(
    step: Step, xs: Sequence[Tensor], state: State, weights: Sequence[Tensor], has_biases: bool, reverse: bool
) -> tuple[list[Tensor], State]:
    """One direction of one layer: outputs in the order of ``xs``, and the last state of every sequence.

    ``xs`` are [sequences still running, features], longest sequences first; the others' state stays as it is.
    """
    outputs = []
    for x in reversed(xs) if reverse else xs:
        running = len(x)
        new = step(x, tuple(s[:running] for s in state), weights, has_biases)
        outputs.append(new[0])
        state = tuple(n if running == len(s) else torch.cat([n, s[running:]]) for n, s in zip(new, state, strict=True))
    return outputs[::-1] if reverse else outputs, state


def _recurrent(
    step: Step,
    data: Tensor,
    batch_sizes: Tensor | None,
    hx: State,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """The output and the last states, [layers x directions, sequences, features].

    ``data`` is [time, sequences, features], or packed: [sum of batch sizes, features].
    """
    directions = 2 if bidirectional else 1
    per_run = len(params) // (num_layers * directions)
    sizes = None if batch_sizes is None else batch_sizes.tolist()
    states = []
    for layer in range(num_layers):
        both = []
        for direction in range(directions):
            run = layer * directions + direction
            weights = params[run * per_run : (run + 1) * per_run]
            projected = F.linear(data, weights[0], weights[2] if has_biases else None)
            xs = projected.unbind(0) if sizes is None else projected.split(sizes)
            state = tuple(s[run] for s in hx)
            outputs, state = _run(step, xs, state, weights, has_biases, reverse=direction == 1)
            both.append(torch.stack(outputs) if sizes is None else torch.cat(outputs))
            states.append(state)
        data = torch.cat(both, -1)
        if layer < num_layers - 1:
            data = F.dropout(data, dropout, train)
    return data, *(torch.stack(s) for s in zip(*states, strict=True))


def _as_in_torch(step: Step) -> Callable[..., tuple[Tensor, ...]]:
    """The function with PyTorch's two sets of arguments: for a tensor, and for a packed sequence."""

    def function(*args: Any) -> tuple[Tensor, ...]:
        if isinstance(args[3], list | tuple):  # data, batch_sizes, hx, params, …
            data, batch_sizes, hx, *rest = args
            batch_first = False
        else:
            (data, hx, *rest, batch_first), batch_sizes = args, None
        hx = (hx,) if isinstance(hx, Tensor) else hx
        output, *states = _recurrent(step, data.transpose(0, 1) if batch_first else data, batch_sizes, hx, *rest)
        return output.transpose(0, 1) if batch_first else output, *states

    return function


lstm = _as_in_torch(_lstm_step)
gru = _as_in_torch(_gru_step)
rnn_tanh = _as_in_torch(_tanh_step)
rnn_relu = _as_in_torch(_relu_step)


def lstm_cell(
    input: Tensor, hx: State, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> State:
    """``torch.lstm_cell``: no vmap."""
    has_biases = b_ih is not None and b_hh is not None
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
    return _lstm_step(F.linear(input, w_ih, b_ih), tuple(hx), weights, has_biases)


def pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """``torch._pack_padded_sequence``: no forward mode. Data, and how many sequences run at each time."""
    steps, ends = input.transpose(0, 1) if batch_first else input, lengths.tolist()
    sizes = [sum(time < end for end in ends) for time in range(max(ends))]
    return torch.cat([x[:size] for x, size in zip(steps[: len(sizes)], sizes, strict=True)]), _plain(sizes)


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """``torch._pad_packed_sequence``, which wants the sizes' address. Padded data, and each sequence's length."""
    sizes = batch_sizes.tolist()
    lengths = [sum(size > i for size in sizes) for i in range(sizes[0])]
    sizes = sizes + [0] * (total_length - len(sizes))
    per_step = data.split(sizes)
    full = [F.pad(x, [0, 0] * (x.ndim - 1) + [0, sizes[0] - len(x)], value=padding_value) for x in per_step]
    return torch.stack(full, 1 if batch_first else 0), _plain(lengths)


def _plain(numbers: list[int]) -> Tensor:
    """A tensor that no transform has wrapped."""
    with torch._C._DisableFuncTorch():
        return torch.tensor(numbers)
