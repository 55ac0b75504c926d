"""The layers whose derivatives `operators.py` compares: name, layer, and shapes of its inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Function = Callable[..., torch.Tensor]


class Of(nn.Module):
    """A function as a layer, with learnt tensors of the given shapes as its last arguments."""

    def __init__(self, function: Function, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.learnt = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return self.function(*x, *self.learnt)


class First(nn.Module):
    """A layer's first output."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        output = self.layer(*x, **self.options)
        return output[0] if isinstance(output, tuple) else output


class Self(First):
    """Self-attention of a layer."""

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[0], x[0], x[0])


def packed(kind: type[nn.RNNBase]) -> nn.Module:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(3, 2, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sequence = nn.utils.rnn.pack_padded_sequence(x, [2, 4], enforce_sorted=False)
            output, _ = self.layer(sequence)
            return nn.utils.rnn.pad_packed_sequence(output)[0]

    return Packed()


class ChannelsLast(nn.Module):
    def forward(self, x):
        return x.movedim(1, -1).contiguous().movedim(-1, 1)


Case = tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]


def linear_layers() -> Iterator[tuple[str, Case]]:
    yield "Linear", (lambda: nn.Linear(3, 2), ((4, 3),))
    yield "Bilinear", (lambda: nn.Bilinear(3, 2, 4), ((4, 3), (4, 2)))
    tokens = torch.tensor([[0, 2, 1], [3, 3, 0]])
    yield "Embedding", (lambda: Of(lambda w: F.embedding(tokens, w), (4, 3)), ())
    for mode in ("sum", "mean", "max"):
        yield f"EmbeddingBag {mode}", (
            lambda mode=mode: Of(lambda w: F.embedding_bag(tokens, w, mode=mode), (4, 3)), ()
        )  # fmt: skip
    for d, conv, transposed in ((1, nn.Conv1d, nn.ConvTranspose1d), (2, nn.Conv2d, nn.ConvTranspose2d),
                                (3, nn.Conv3d, nn.ConvTranspose3d)):  # fmt: skip
        size = (5,) * d if d < 3 else (3,) * d
        yield f"Conv{d}d", (lambda conv=conv: conv(2, 4, 3, stride=2, padding=1, groups=2), ((2, 2, *size),))
        yield f"ConvTranspose{d}d", (lambda t=transposed: t(2, 4, 3, stride=2, groups=2), ((2, 2, *size),))
    yield "einsum", (lambda: Of(lambda x, w: torch.einsum("bij,jk,bk->bi", x, w, x[:, 0]), (3, 3)), ((2, 2, 3),))
    yield "weight_norm", (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), ((4, 3),))
    yield "spectral_norm eval", (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)).eval(), ((4, 3),))
    yield "orthogonal", (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), ((4, 3),))


def norms() -> Iterator[tuple[str, Case]]:
    yield "LayerNorm", (lambda: nn.LayerNorm(4), ((3, 4),))
    yield "LayerNorm over 2 dims", (lambda: nn.LayerNorm((2, 4)), ((3, 2, 4),))
    yield "LayerNorm without affine", (lambda: nn.LayerNorm(4, elementwise_affine=False), ((3, 4),))
    yield "RMSNorm", (lambda: nn.RMSNorm(4), ((3, 4),))
    yield "GroupNorm", (lambda: nn.GroupNorm(2, 4), ((3, 4, 2),))
    yield "GroupNorm channels_last", (lambda: nn.Sequential(ChannelsLast(), nn.GroupNorm(2, 4)), ((2, 4, 2, 2),))
    yield "InstanceNorm1d", (lambda: nn.InstanceNorm1d(2, affine=True), ((3, 2, 4),))
    yield "InstanceNorm2d", (lambda: nn.InstanceNorm2d(2), ((3, 2, 2, 3),))
    yield "BatchNorm1d eval", (lambda: nn.BatchNorm1d(3).eval(), ((4, 3),))
    yield "BatchNorm2d eval", (lambda: nn.BatchNorm2d(3).eval(), ((2, 3, 2, 2),))
    yield "BatchNorm1d train, no statistics", (lambda: nn.BatchNorm1d(3, track_running_stats=False), ((4, 3),))
    yield "BatchNorm1d train", (lambda: nn.BatchNorm1d(3), ((4, 3),))
    yield "LocalResponseNorm", (lambda: nn.LocalResponseNorm(2), ((2, 3, 4),))
    yield "F.normalize", (lambda: Of(lambda x: F.normalize(x, dim=-1)), ((3, 4),))


def activations() -> Iterator[tuple[str, Case]]:
    for kind in (
        nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
        nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
        nn.Hardshrink, nn.Softshrink, nn.GLU, nn.RReLU,
    ):  # fmt: skip
        yield kind.__name__, (lambda kind=kind: kind().eval(), ((3, 4),))
    yield "GELU tanh", (lambda: nn.GELU("tanh"), ((3, 4),))
    for kind in (nn.Softmax, nn.LogSoftmax, nn.Softmin):
        yield kind.__name__, (lambda kind=kind: kind(-1), ((3, 4),))
    yield "masked softmax", (lambda: Of(lambda x: causal(x).softmax(-1)), ((3, 3),))
    yield "gumbel_softmax", (lambda: Of(seeded_gumbel), ((3, 4),))
    for name in ("logsumexp", "cumsum", "cumprod", "logcumsumexp", "std", "var", "prod", "norm", "amax", "sort"):
        yield name, (lambda name=name: Of(lambda x: first(getattr(torch, name)(x, dim=-1))), ((3, 4),))
    for name in ("sinc", "erf", "erfinv", "lgamma", "digamma", "atan2", "sin", "logit", "log1p", "expm1", "rsqrt"):
        yield name, (lambda name=name: Of(functools.partial(elementary, name)), ((3, 4),))


def elementary(name: str, x: torch.Tensor) -> torch.Tensor:
    inside = 0.1 + 0.8 * x.sigmoid()  # of every domain
    return torch.atan2(inside, x) if name == "atan2" else getattr(torch, name)(inside)


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def causal(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(~torch.ones(x.shape, dtype=torch.bool).tril(), float("-inf"))


def seeded_gumbel(x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    return (x - (-noise.log()).log()).softmax(-1)


def images() -> Iterator[tuple[str, Case]]:
    for d in (1, 2, 3):
        image = (2, 2, *(4,) * d)
        for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "LPPool"):
            kind, args = getattr(nn, f"{name}{d}d"), (2, 2) if name == "LPPool" else (2,)
            positive = name == "LPPool"
            yield (
                f"{name}{d}d",
                (
                    lambda kind=kind, args=args, positive=positive: nn.Sequential(
                        nn.Softplus() if positive else nn.Identity(), kind(*args)
                    ),
                    (image,),
                ),
            )
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        yield f"interpolate {mode}", (
            lambda mode=mode: Of(lambda x: F.interpolate(x, scale_factor=1.5, mode=mode)), ((1, 2, 4, 4),)
        )  # fmt: skip
    yield "interpolate linear", (lambda: Of(lambda x: F.interpolate(x, 7, mode="linear")), ((1, 2, 4),))
    yield (
        "interpolate trilinear",
        (lambda: Of(lambda x: F.interpolate(x, (3, 3, 3), mode="trilinear")), ((1, 1, 2, 2, 2),)),
    )
    yield "interpolate antialias", (
        lambda: Of(lambda x: F.interpolate(x, (2, 3), mode="bilinear", antialias=True)), ((1, 2, 4, 4),)
    )  # fmt: skip
    for mode in ("bilinear", "nearest", "bicubic"):
        yield (
            f"grid_sample {mode}",
            (
                lambda mode=mode: Of(lambda x, g: F.grid_sample(x, g.tanh(), mode=mode, align_corners=False)),
                ((1, 2, 4, 4), (1, 3, 3, 2)),
            ),
        )
    yield "grid_sample 3-D", (
        lambda: Of(lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False)), ((1, 1, 3, 3, 3), (1, 2, 2, 2, 3))
    )  # fmt: skip
    yield "affine_grid", (lambda: Of(lambda t: F.affine_grid(t, [1, 1, 3, 3], align_corners=False)), ((1, 2, 3),))
    yield "fold", (lambda: Of(lambda x: F.fold(x, (4, 4), 2, stride=1)), ((1, 8, 9),))
    yield "unfold", (lambda: Of(lambda x: F.unfold(x, 2)), ((1, 2, 4, 4),))
    yield "pixel_shuffle", (lambda: nn.PixelShuffle(2), ((1, 4, 2, 2),))
    yield "pixel_unshuffle", (lambda: nn.PixelUnshuffle(2), ((1, 1, 4, 4),))
    for mode in ("reflect", "replicate", "circular", "constant"):
        yield f"pad {mode}", (lambda mode=mode: Of(lambda x: F.pad(x, (1, 1, 1, 1), mode=mode)), ((1, 2, 3, 3),))


def attention() -> Iterator[tuple[str, Case]]:
    qkv = ((1, 2, 4, 4),) * 3
    yield "scaled_dot_product_attention", (lambda: Of(F.scaled_dot_product_attention), qkv)
    yield "scaled_dot_product_attention causal", (
        lambda: Of(functools.partial(F.scaled_dot_product_attention, is_causal=True)), qkv
    )  # fmt: skip
    mask = torch.ones(4, 4, dtype=torch.bool).tril(1)
    yield "scaled_dot_product_attention masked", (
        lambda: Of(functools.partial(F.scaled_dot_product_attention, attn_mask=mask)), qkv
    )  # fmt: skip
    yield (
        "scaled_dot_product_attention grouped",
        (
            lambda: Of(functools.partial(F.scaled_dot_product_attention, enable_gqa=True)),
            ((1, 4, 4, 4), (1, 2, 4, 4), (1, 2, 4, 4)),
        ),
    )
    for weights in (True, False):
        yield (
            f"MultiheadAttention need_weights={weights}",
            (
                lambda weights=weights: Self(nn.MultiheadAttention(4, 2, batch_first=True), need_weights=weights),
                ((2, 3, 4),),
            ),
        )
    yield "MultiheadAttention eval", (
        lambda: Self(nn.MultiheadAttention(4, 2, batch_first=True), need_weights=False).eval(), ((2, 3, 4),)
    )  # fmt: skip
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        shapes = ((2, 3, 4),) * (1 if kind is nn.TransformerEncoderLayer else 2)
        for mode in (True, False):
            yield (
                f"{kind.__name__} {'train' if mode else 'eval'}",
                (
                    lambda kind=kind, mode=mode: kind(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True).train(
                        mode
                    ),
                    shapes,
                ),
            )
    yield (
        "TransformerEncoder eval",
        (
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True), 2
            ).eval(),
            ((2, 3, 4),),
        ),
    )


def recurrent() -> Iterator[tuple[str, Case]]:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield kind.__name__, (lambda kind=kind: First(kind(3, 2)), ((4, 2, 3),))
        yield f"{kind.__name__} bidirectional, 2 layers", (
            lambda kind=kind: First(kind(3, 2, 2, bidirectional=True, batch_first=True)), ((2, 4, 3),)
        )  # fmt: skip
        yield f"{kind.__name__} packed", (lambda kind=kind: packed(kind), ((4, 2, 3),))
    yield "LSTM with projections", (lambda: First(nn.LSTM(3, 4, proj_size=2)), ((4, 2, 3),))
    yield "RNN relu", (lambda: First(nn.RNN(3, 2, nonlinearity="relu")), ((4, 2, 3),))
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        yield kind.__name__, (lambda kind=kind: First(kind(3, 2)), ((4, 3),))


def losses() -> Iterator[tuple[str, Case]]:
    classes, signs = torch.tensor([0, 2, 1]), torch.tensor([1.0, -1.0, 1.0])
    target = torch.rand(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    yield "cross_entropy", (lambda: Of(lambda x: F.cross_entropy(x, classes)), ((3, 4),))
    yield "cross_entropy smoothed", (
        lambda: Of(lambda x: F.cross_entropy(x, classes, label_smoothing=0.1, ignore_index=2)), ((3, 4),)
    )  # fmt: skip
    yield "cross_entropy of probabilities", (lambda: Of(lambda x: F.cross_entropy(x, target)), ((3, 4),))
    yield "nll_loss of an image", (
        lambda: Of(lambda x: F.nll_loss(x.log_softmax(1), classes.expand(2, 2, 3) % 2)), ((2, 3, 2, 3),)
    )  # fmt: skip
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
                 "kl_div", "poisson_nll_loss", "soft_margin_loss"):  # fmt: skip
        yield name, (lambda name=name: Of(lambda x: getattr(F, name)(x, target)), ((3, 4),))
    yield "binary_cross_entropy", (lambda: Of(lambda x: F.binary_cross_entropy(x.sigmoid(), target)), ((3, 4),))
    yield (
        "gaussian_nll_loss",
        (lambda: Of(lambda x, s: F.gaussian_nll_loss(x, target, F.softplus(s))), ((3, 4), (3, 4))),
    )
    yield "multi_margin_loss", (lambda: Of(lambda x: F.multi_margin_loss(x, classes)), ((3, 4),))
    yield "multilabel_margin_loss", (
        lambda: Of(lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, 2, -1, 1]] * 3))), ((3, 4),)
    )  # fmt: skip
    yield "margin_ranking_loss", (lambda: Of(lambda x, y: F.margin_ranking_loss(x, y, signs)), ((3,), (3,)))
    yield "cosine_embedding_loss", (lambda: Of(lambda x, y: F.cosine_embedding_loss(x, y, signs)), ((3, 4), (3, 4)))
    yield "triplet_margin_loss", (lambda: Of(F.triplet_margin_loss), ((3, 4),) * 3)
    yield "ctc_loss", (lambda: Of(ctc), ((5, 2, 4),))
    yield "cosine_similarity", (lambda: Of(F.cosine_similarity), ((3, 4), (3, 4)))
    yield "pairwise_distance", (lambda: Of(F.pairwise_distance), ((3, 4), (3, 4)))
    yield "cdist", (lambda: Of(torch.cdist), ((3, 4), (2, 4)))
    yield "cdist p=1", (lambda: Of(functools.partial(torch.cdist, p=1.0)), ((3, 4), (2, 4)))
    yield "pdist", (lambda: Of(F.pdist), ((4, 3),))


def ctc(x: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2], [3, 1]]), torch.tensor([5, 5]), torch.tensor([2, 2]))


def messages() -> Iterator[tuple[str, Case]]:
    to = torch.tensor([0, 2, 0, 1])
    zeros = torch.zeros(3, 2, dtype=torch.float64)
    each = to[:, None].expand(4, 2)
    yield "index_add", (lambda: Of(lambda x: zeros.index_add(0, to, x.square())), ((4, 2),))
    yield "scatter_add", (lambda: Of(lambda x: zeros.scatter_add(0, each, x.square())), ((4, 2),))
    for how in ("sum", "mean", "amax", "prod"):
        yield f"scatter_reduce {how}", (
            lambda how=how: Of(lambda x: zeros.scatter_reduce(0, each, x.exp(), how, include_self=False)), ((4, 2),)
        )  # fmt: skip
        yield (
            f"index_reduce {how}",
            (
                lambda how=how: Of(
                    lambda x: zeros.index_reduce(0, to, x.exp(), how.replace("sum", "mean"), include_self=False)
                ),
                ((4, 2),),
            ),
        )
        yield (
            f"segment_reduce {how}",
            (
                lambda how=how: Of(
                    lambda x: torch.segment_reduce(
                        x.exp(), how.replace("a", "", how == "amax"), lengths=torch.tensor([2, 1, 1])
                    )
                ),
                ((4, 2),),
            ),
        )
    yield "gather", (lambda: Of(lambda x: x.exp().gather(0, each.clamp(max=2))), ((3, 2),))
    yield "index_select", (lambda: Of(lambda x: x.exp().index_select(0, to)), ((3, 2),))
    yield "index_put", (lambda: Of(lambda x: zeros.index_put((to,), x.exp(), accumulate=True)), ((4, 2),))
    yield "masked_fill, where", (lambda: Of(lambda x: torch.where(x > 0, x.exp(), x.masked_fill(x > 0, 0))), ((4, 2),))


def linalg() -> Iterator[tuple[str, Case]]:
    def symmetric(a: torch.Tensor) -> torch.Tensor:
        return a @ a.mT + 3 * torch.eye(a.shape[-1], dtype=a.dtype)

    square, eye = ((3, 3),), torch.eye(3, dtype=torch.float64)
    yield "linalg.norm", (lambda: Of(lambda a: torch.linalg.norm(a)), square)
    yield "linalg.vector_norm", (lambda: Of(lambda a: torch.linalg.vector_norm(a, dim=-1)), square)
    yield "linalg.matrix_norm nuclear", (lambda: Of(lambda a: torch.linalg.matrix_norm(a, "nuc")), square)
    yield "linalg.solve", (lambda: Of(lambda a, b: torch.linalg.solve(symmetric(a), b)), ((3, 3), (3, 2)))
    yield "linalg.solve_triangular", (
        lambda: Of(lambda a, b: torch.linalg.solve_triangular(a.tril() + 3 * eye, b, upper=False)), ((3, 3), (3, 2))
    )  # fmt: skip
    yield "linalg.inv", (lambda: Of(lambda a: torch.linalg.inv(symmetric(a))), square)
    yield "linalg.pinv", (lambda: Of(lambda a: torch.linalg.pinv(a)), ((4, 3),))
    yield "linalg.lstsq", (lambda: Of(lambda a, b: torch.linalg.lstsq(a, b).solution), ((4, 3), (4, 2)))
    yield "linalg.det", (lambda: Of(torch.linalg.det), square)
    yield "linalg.slogdet", (lambda: Of(lambda a: torch.linalg.slogdet(symmetric(a)).logabsdet), square)
    yield "linalg.cholesky", (lambda: Of(lambda a: torch.linalg.cholesky(symmetric(a))), square)
    yield "linalg.cholesky_solve", (
        lambda: Of(lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(symmetric(a)))), ((3, 3), (3, 2))
    )  # fmt: skip
    yield "linalg.eigh", (lambda: Of(lambda a: torch.linalg.eigh(symmetric(a)).eigenvalues), square)
    yield "linalg.eigh vectors", (lambda: Of(lambda a: torch.linalg.eigh(symmetric(a)).eigenvectors.square()), square)
    yield "linalg.svd", (lambda: Of(lambda a: torch.linalg.svd(a, full_matrices=False).S), ((4, 3),))
    yield "linalg.svd vectors", (lambda: Of(lambda a: torch.linalg.svd(a, full_matrices=False).U.square()), ((4, 3),))
    yield "linalg.qr", (lambda: Of(lambda a: torch.linalg.qr(a).R), ((4, 3),))
    yield "linalg.matrix_exp", (lambda: Of(torch.linalg.matrix_exp), square)
    yield "linalg.cross", (lambda: Of(torch.linalg.cross), ((2, 3), (2, 3)))
    for name in ("fft", "rfft", "fft2", "rfft2"):
        yield f"fft.{name}", (
            lambda name=name: Of(lambda x: torch.view_as_real(getattr(torch.fft, name)(x)).square().sum(-1)), ((3, 4),)
        )  # fmt: skip
    yield "fft.irfft", (lambda: Of(lambda x: torch.fft.irfft(torch.complex(x, x.sin()))), ((3, 4),))
    yield "fft of a spectral convolution", (
        lambda: Of(lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(w)), (3, 2)), ((2, 4),)
    )  # fmt: skip


def more() -> Iterator[tuple[str, Case]]:
    square = ((3, 3),)
    for p in (0.5, 1, 3, float("inf")):
        yield f"vector_norm p={p}", (lambda p=p: Of(lambda x: torch.linalg.vector_norm(x, p, dim=-1)), ((3, 4),))
        yield f"Tensor.norm p={p}", (lambda p=p: Of(lambda x: x.norm(p, dim=-1)), ((3, 4),))
    for name in ("median", "cummax", "cummin", "nanmean", "cov", "corrcoef", "trace", "tril", "diagonal", "diag_embed",
                 "nan_to_num", "nansum", "mean", "max", "min", "aminmax", "std_mean", "var_mean"):  # fmt: skip
        yield (
            name,
            (
                lambda name=name: (
                    Of(lambda x: first(getattr(torch, name)(x.exp())))
                    if name not in ("cummax", "cummin")
                    else Of(lambda x: first(getattr(torch, name)(x.exp(), 0)))
                ),
                square,
            ),
        )
    for name in ("bmm", "kron", "hypot", "xlogy", "lerp", "pow", "dist", "maximum", "fmod", "logaddexp", 
                 "addmm", "baddbmm", "addcdiv", "outer", "copysign", "cross", "polar", "remainder"):  # fmt: skip
        yield name, (lambda name=name: Of(functools.partial(binary, name)), ((2, 3, 3), (2, 3, 3)))
    for name in ("gammaln", "ndtri", "erfcx", "log_ndtr", "entr", "i0", "i0e", "i1", "bessel_j0", "bessel_j1", "ndtr",
                 "expit", "xlog1py", "zeta", "polygamma", "exp2"):  # fmt: skip
        yield f"special.{name}", (lambda name=name: Of(functools.partial(special, name)), ((3, 4),))
    for name in ("acosh", "asinh", "atanh", "tan", "asin", "acos", "cosh", "sqrt", "log2", "log10", "frac", "deg2rad",
                 "mvlgamma", "angle"):  # fmt: skip
        yield name, (lambda name=name: Of(functools.partial(unary, name)), ((3, 4),))
    yield "topk", (lambda: Of(lambda x: torch.topk(x.exp(), 2)[0]), square)
    yield "kthvalue", (lambda: Of(lambda x: torch.kthvalue(x.exp(), 2)[0]), square)
    yield "quantile", (lambda: Of(lambda x: torch.quantile(x.exp(), 0.3, dim=-1)), square)
    yield "clamp", (lambda: Of(lambda x: x.exp().clamp(0.5, 1.5)), square)
    yield "clamp by tensors", (lambda: Of(lambda x, y: torch.clamp(x.exp(), y, y + 1)), ((3, 3), (3, 3)))
    yield "renorm", (lambda: Of(lambda x: torch.renorm(x, 2, 0, 0.5)), square)
    yield "complex abs", (lambda: Of(lambda x, y: torch.complex(x, y).abs()), ((3,), (3,)))
    yield "complex angle", (lambda: Of(lambda x, y: torch.complex(x, y).angle()), ((3,), (3,)))
    yield "complex matmul", (
        lambda: Of(lambda x: torch.view_as_real(torch.complex(x, x.sin()) @ torch.complex(x.cos(), x))), square
    )  # fmt: skip
    yield "stft", (lambda: Of(lambda x: torch.stft(x, 4, 2, window=torch.hann_window(4, dtype=x.dtype),
                   return_complex=True).abs().square()), ((12,),))  # fmt: skip
    yield "masked_scatter", (lambda: Of(lambda x, y: x.masked_scatter(torch.eye(3) > 0, y.exp())), ((3, 3), (3, 3)))
    yield "take_along_dim", (lambda: Of(lambda x: torch.take_along_dim(x.exp(), torch.tensor([[0, 0, 2]]), 1)), square)
    yield "trapezoid", (lambda: Of(lambda x: torch.trapezoid(x.exp())), square)
    yield "diff, roll, flip", (lambda: Of(lambda x: torch.diff(x.exp()).roll(1).flip(0)), square)
    yield "softmax in float64", (lambda: Of(lambda x: x.softmax(-1, dtype=torch.float64)), square)
    yield "MaxUnpool2d", (lambda: Of(unpool), ((1, 1, 4, 4),))
    yield "FractionalMaxPool2d", (
        lambda: Of(lambda x: F.fractional_max_pool2d(
            x, 2, 2, _random_samples=torch.full((1, 1, 2), 0.3, dtype=x.dtype))), ((1, 1, 5, 5),)
    )  # fmt: skip
    yield "Softmax2d", (lambda: nn.Softmax2d(), ((1, 3, 2, 2),))
    yield "Threshold", (lambda: nn.Threshold(0.1, 2), square)
    yield "AdaptiveLogSoftmaxWithLoss", (
        lambda: Of(nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2]).double().log_prob), ((3, 4),)
    )  # fmt: skip
    yield "CosineSimilarity at equal", (lambda: Of(lambda x: F.cosine_similarity(x, x.sin())), square)
    yield "cdist of points with themselves", (lambda: Of(lambda x: torch.cdist(x, x)), square)


def more_linalg() -> Iterator[tuple[str, Case]]:
    def symmetric(a: torch.Tensor) -> torch.Tensor:
        return a @ a.mT + 3 * torch.eye(a.shape[-1], dtype=a.dtype)

    square = ((3, 3),)
    functions: dict[str, Function] = {
        "linalg.eigvalsh": lambda a: torch.linalg.eigvalsh(symmetric(a)),
        "linalg.svdvals": torch.linalg.svdvals,
        "linalg.eigvals": lambda a: torch.linalg.eigvals(symmetric(a)).real.sum(),
        "linalg.eig": lambda a: torch.linalg.eig(symmetric(a)).eigenvectors.abs().square().sum(-1),
        "linalg.matrix_power": lambda a: torch.linalg.matrix_power(a, 3),
        "linalg.cond": lambda a: torch.linalg.cond(symmetric(a)),
        "linalg.lu": lambda a: torch.linalg.lu(symmetric(a)).U,
        "linalg.lu_factor": lambda a: torch.linalg.lu_factor(symmetric(a)).LU,
        "linalg.lu_solve": lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor(symmetric(a)), a),
        "linalg.tensorsolve": lambda a: torch.linalg.tensorsolve(symmetric(a), a[0]),
        "linalg.tensorinv": lambda a: torch.linalg.tensorinv(symmetric(a), 1),
        "linalg.ldl_solve": lambda a: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(symmetric(a)), a),
        "linalg.multi_dot": lambda a: torch.linalg.multi_dot([a, a.sin(), a]),
        "linalg.householder_product": lambda a: torch.linalg.householder_product(a, a[0]),
        "linalg.matrix_norm spectral": lambda a: torch.linalg.matrix_norm(a, 2),
        "linalg.inv_ex": lambda a: torch.linalg.inv_ex(symmetric(a))[0],
        "linalg.solve_ex": lambda a: torch.linalg.solve_ex(symmetric(a), a)[0],
        "linalg.solve of the right": lambda a: torch.linalg.solve(symmetric(a), a, left=False),
        "linalg.solve of a vector": lambda a: torch.linalg.solve(symmetric(a), a[0]),
        "linalg.pinv hermitian": lambda a: torch.linalg.pinv(symmetric(a), hermitian=True),
        "inverse": lambda a: torch.inverse(symmetric(a)),
        "logdet": lambda a: torch.logdet(symmetric(a)),
        "cholesky_inverse": lambda a: torch.cholesky_inverse(torch.linalg.cholesky(symmetric(a))),
        "cholesky_ex": lambda a: torch.linalg.cholesky_ex(symmetric(a)).L,
        "triangular_solve": lambda a: torch.triangular_solve(a, symmetric(a)).solution,
        "det of 4 x 4": lambda a: torch.linalg.det(torch.block_diag(symmetric(a), a[:1, :1]) + a[0, 0].sin()),
        "det of several": lambda a: torch.linalg.det(torch.stack([a, symmetric(a)])),
        "det of a singular matrix": lambda a: torch.linalg.det(a * torch.tensor([[1.0, 1, 1], [1, 1, 1], [0, 0, 0]])),
    }
    for name, function in functions.items():
        yield name, (lambda function=function: Of(function), square)
    yield "linalg.svd full", (lambda: Of(lambda a: torch.linalg.svd(a).U.square()), square)


def unpool(x: torch.Tensor) -> torch.Tensor:
    return F.max_unpool2d(*F.max_pool2d(x.exp(), 2, return_indices=True), 2)


def binary(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.exp(), y.exp()
    match name:
        case "kron" | "outer" | "addmm" | "dist":
            x, y = (x[0, 0], y[0, 0]) if name == "outer" else (x[0], y[0])
            return torch.addmm(x, y, y) if name == "addmm" else getattr(torch, name)(x, y)
        case "lerp":
            return torch.lerp(x, y, x)
        case "baddbmm" | "addcdiv":
            return getattr(torch, name)(x, y, x)
        case "polar":
            return torch.view_as_real(torch.polar(x, y))
    return getattr(torch, name)(x, y)


def special(name: str, x: torch.Tensor) -> torch.Tensor:
    inside = 0.1 + 0.8 * x.sigmoid()
    match name:
        case "xlog1py":
            return torch.special.xlog1py(inside, inside)
        case "zeta":
            return torch.special.zeta(torch.tensor(2.5, dtype=x.dtype), inside)
        case "polygamma":
            return torch.special.polygamma(1, inside)
    return getattr(torch.special, name)(inside)


def unary(name: str, x: torch.Tensor) -> torch.Tensor:
    inside = 0.1 + 0.8 * x.sigmoid()
    match name:
        case "acosh":
            return (inside + 1).acosh()
        case "mvlgamma":
            return torch.mvlgamma(inside + 2, 2)
    return getattr(torch, name)(inside)


SECTIONS = (
    linear_layers,
    norms,
    activations,
    images,
    attention,
    recurrent,
    losses,
    messages,
    linalg,
    more,
    more_linalg,
)
