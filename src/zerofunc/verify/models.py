"""Small models to verify on. Each factory returns ``(module, example)`` with ``module(example)`` a tensor.

The example's first dimension is the batch. Attention is written out and LayerNorm is composite: PyTorch's fused
attention has no second derivative, its softmax no backward through a forward_ad tangent, and its LayerNorm gives wrong
gradients for a backward through a jvp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Factory = Callable[[], tuple[nn.Module, torch.Tensor]]


class CompositeLayerNorm(nn.Module):
    """LayerNorm over the last dimension from elementary operations."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised over the last dimension."""
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias


class Attention(nn.Module):
    """A transformer block with attention written out, and a readout."""

    def __init__(self, dim: int = 6, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = CompositeLayerNorm(dim), CompositeLayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.readout = nn.Linear(dim, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, dim] to [batch, 2]."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (dim // self.heads) ** 0.5
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
        weights = weights / weights.sum(-1, keepdim=True)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, dim))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        result: torch.Tensor = self.readout(x).mean(1)
        return result


class Conv(nn.Module):
    """Convolution, BatchNorm in evaluation mode, strided and transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.SiLU(),
            nn.Conv2d(3, 4, 2, stride=2),
            nn.GroupNorm(2, 4),
        )
        self.up, self.head = nn.ConvTranspose2d(4, 2, 2), nn.Linear(2 * 3 * 3, 2)
        norm = self.body[1]
        assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 1, 4, 4] to [batch, 2]."""
        result: torch.Tensor = self.head(torch.tanh(self.up(self.body(x))).flatten(1))
        return result


class Lstm(nn.Module):
    """Two layers of LSTM and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, 3] to [batch, 2]."""
        result: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return result


class Shared(nn.Module):
    """Tied, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.third.weight.requires_grad_(False)
        self.unused, self.head = nn.Linear(3, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 4] to [batch, 2]."""
        hidden = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        result: torch.Tensor = self.head(hidden)
        return result


class Fused(nn.Module):
    """What PyTorch computes with fused kernels: LayerNorm, attention and LSTM, as users write them."""

    def __init__(self, dim: int = 6, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.lstm = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.LSTM(dim, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, dim] to [batch, 2]."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.normalise(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.attend(q, k, v).transpose(1, 2).reshape(batch, length, dim)
        result: torch.Tensor = self.head(self.recur(x))
        return result

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """LayerNorm over the last dimension."""
        result: torch.Tensor = self.norm(x)
        return result

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def recur(self, x: torch.Tensor) -> torch.Tensor:
        """Last state of the LSTM."""
        result: torch.Tensor = self.lstm(x)[0][:, -1]
        return result


class Composed(Fused):
    """The same from elementary operations, which plain PyTorch differentiates rightly."""

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """LayerNorm over the last dimension."""
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.norm.eps)
        return scaled * self.norm.weight + self.norm.bias

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention."""
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights = torch.exp(scores.masked_fill(hidden, float("-inf")))
        return (weights / weights.sum(-1, keepdim=True)) @ v

    def recur(self, x: torch.Tensor) -> torch.Tensor:
        """Last state of the LSTM."""
        w = dict(self.lstm.named_parameters())
        h = c = x.new_zeros(len(x), self.lstm.hidden_size)
        for step in x.unbind(1):
            gates = step @ w["weight_ih_l0"].T + w["bias_ih_l0"] + h @ w["weight_hh_l0"].T + w["bias_hh_l0"]
            i, f, g, o = gates.chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


class FromEmbeddings(nn.Module):
    """A causal language model of transformers on input embeddings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()
        for owner in list(model.modules()):
            for name, child in owner.named_children():
                if isinstance(child, nn.LayerNorm):
                    setattr(owner, name, CompositeLayerNorm(child.normalized_shape[0]))
                if type(child).__name__ == "LlamaRMSNorm":  # which computes in float32
                    dim = next(child.parameters()).numel()
                    setattr(owner, name, nn.RMSNorm(dim, eps=1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, dim] to the last logits [batch, vocabulary]."""
        logits: torch.Tensor = self.model(inputs_embeds=x, use_cache=False).logits
        return logits[:, -1]


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Three linear layers with tanh."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    return net, torch.randn(3, 4)


def attention() -> tuple[nn.Module, torch.Tensor]:
    """:class:`Attention` on two sequences of three."""
    return Attention(), torch.randn(2, 3, 6)


def conv() -> tuple[nn.Module, torch.Tensor]:
    """:class:`Conv` on two images."""
    return Conv(), torch.randn(2, 1, 4, 4)


def lstm() -> tuple[nn.Module, torch.Tensor]:
    """:class:`Lstm` on two sequences of four."""
    return Lstm(), torch.randn(2, 4, 3)


def shared() -> tuple[nn.Module, torch.Tensor]:
    """:class:`Shared` on three samples."""
    return Shared(), torch.randn(3, 4)


def fused() -> tuple[nn.Module, torch.Tensor]:
    """:class:`Fused` on two sequences of three."""
    return Fused(), torch.randn(2, 3, 6)


def composed() -> tuple[nn.Module, torch.Tensor]:
    """:class:`Composed` on two sequences of three."""
    return Composed(), torch.randn(2, 3, 6)


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    """A tiny GPT-2 of transformers with eager attention and composite LayerNorm."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(  # type: ignore[call-arg]
        vocab_size=7, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return FromEmbeddings(GPT2LMHeadModel(config)), torch.randn(2, 3, 8)


def llama() -> tuple[nn.Module, torch.Tensor]:
    """A tiny Llama of transformers (rotary positions, grouped queries) with attention written out in float64."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("composite", _composite_attention)
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8, attn_implementation="composite",
    )  # fmt: skip
    return FromEmbeddings(LlamaForCausalLM(config)), torch.randn(2, 3, 8)


def _composite_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **options: object
) -> tuple[torch.Tensor, None]:
    """Causal attention for transformers, whose eager one computes its softmax in float32."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(-1, -2)) / query.shape[-1] ** 0.5
    weights = torch.softmax(scores.masked_fill(~causal, float("-inf")), -1)
    return (weights @ value).transpose(1, 2), None
