"""zerofunc.attention: the numbers of PyTorch's math kernel, every derivative, and no matrix of queries by keys."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import zerofunc
from reference import build, engine_of
from test_checkpoint import PeakBytes
from zerofunc import attention


def math_attention(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def qkv(queries=5, keys=5, heads=2, kv_heads=None, width=3, values=None):
    kv = kv_heads or heads
    return draw(2, heads, queries, width), draw(2, kv, keys, width), draw(2, kv, keys, values or width)


def assert_close(found, expected, name=""):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda message: f"{name}: {message}")


def padding():
    """The last keys of the second sample are padding; the first sample has a query that sees nothing."""
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, ..., 3:] = mask[0, :, 2] = False
    return mask


CASES = {
    "plain": (qkv, {}),
    "causal": (qkv, {"is_causal": True}),
    "causal, more keys": (functools.partial(qkv, 4, 7), {"is_causal": True}),
    "causal, more queries": (functools.partial(qkv, 7, 4), {"is_causal": True}),
    "cross": (functools.partial(qkv, 7, 3, values=4), {"scale": 0.3}),
    "bool mask": (qkv, {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(1)}),
    "key padding": (qkv, {"attn_mask": padding()}),
    "keys alone": (qkv, {"attn_mask": torch.tensor([[True, True, False, True, False]])}),
    "float mask": (qkv, {"attn_mask": torch.linspace(-1, 1, 50).double().view(2, 5, 5)}),
    "float mask with -inf": (qkv, {"attn_mask": torch.zeros(5, 5).double().masked_fill(~padding()[1, 0], -torch.inf)}),
    "grouped heads": (functools.partial(qkv, heads=4, kv_heads=2), {"enable_gqa": True}),
    "one head of keys": (functools.partial(qkv, heads=4, kv_heads=1), {"enable_gqa": True, "is_causal": True}),
    "no keys": (functools.partial(qkv, 3, 0), {}),
    "no queries": (functools.partial(qkv, 0, 3), {}),
}
BLOCKS = [1, 2, 5, 64]


@pytest.mark.parametrize("case", CASES)
def test_values_and_derivatives_are_those_of_the_math_kernel(case):
    torch.manual_seed(0)
    make, options = CASES[case]
    primals, tangents = make(), make()
    reference = with_sight if case == "key padding" else functools.partial(math_attention, **options)
    expected = derivatives(reference, primals, tangents)
    for block_size in (2, 64):
        found = derivatives(functools.partial(attention, block_size=block_size, **options), primals, tangents)
        assert_close(found, expected, f"block of {block_size}")


def with_sight(q, k, v):
    """The math kernel on key padding. Its second derivatives are NaN where a query sees nothing: there it sees all."""
    mask = padding()
    blind = ~mask.any(-1, keepdim=True)
    return math_attention(q, k, v, mask | blind).masked_fill(blind, 0.0)


def derivatives(f, primals, tangents):
    """Value, tangent, gradient, and the Hessian times a vector in three orders."""

    def loss(*args):
        return f(*args).square().sum()

    every = (0, 1, 2)
    slope = grad(loss, every)

    def along(*args):
        return sum((g * t).sum() for g, t in zip(slope(*args), tangents, strict=True))

    return {
        "value and jvp": jvp(f, primals, tangents),
        "grad": slope(*primals),
        "forward over reverse": jvp(slope, primals, tangents)[1],
        "reverse over forward": grad(lambda *args: jvp(loss, args, tangents)[1], every)(*primals),
        "reverse over reverse": grad(along, every)(*primals),
    }


@pytest.mark.parametrize("block_size", BLOCKS)
def test_other_derivatives(block_size):
    torch.manual_seed(0)
    q, k, v = qkv()
    mask = draw(5, 5)
    found = {}
    for f in (functools.partial(attention, block_size=block_size), math_attention):

        def loss(x, f=f):
            return f(x, k, v, mask).square().sum()

        found[f] = [
            jacrev(lambda x, f=f: f(x, k, v)[0, 0, 0])(q), jacfwd(lambda x, f=f: f(x, k, v)[0, 0, 0])(q),
            hessian(lambda x, loss=loss: loss(q + x))(draw(3) * 0), vmap(grad(loss))(q), vmap(f)(q, k, v),
            grad(lambda m, f=f: f(q, k, v, m).square().sum())(mask), vjp(loss, q)[1](torch.tensor(2.0).double())[0],
            grad(lambda z, loss=loss: jvp(grad(loss), (z,), (q,))[1].square().sum())(q),
        ]  # fmt: skip
    assert_close(*found.values())


def train_through_jvp(f, leaves, tangents, dual):
    """Gradients of a loss on a tangent."""
    if dual:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents, strict=True)]
            tangent = forward_ad.unpack_dual(f(*duals)).tangent
    else:
        tangent = jvp(f, leaves, tangents)[1]
    return torch.autograd.grad(tangent.square().sum(), leaves)


def test_backward_through_a_jvp():
    """PyTorch's softmax has none through forward_ad; torch.func.jvp of the math kernel is the reference for both."""
    torch.manual_seed(0)
    leaves, tangents = tuple(x.requires_grad_() for x in qkv()), qkv()
    expected = train_through_jvp(math_attention, leaves, tangents, dual=False)
    for dual in (False, True):
        f = functools.partial(attention, block_size=2)
        assert_close(train_through_jvp(f, leaves, tangents, dual), expected, f"forward_ad: {dual}")


def test_dropout():
    """Weights are dropped with the probability and scaled; every run of a call drops the same ones."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 400, 4), torch.randn(1, 1, 300, 4), torch.eye(300).view(1, 1, 300, 300)
    weights = attention(q, k, v, dropout_p=0.25, block_size=64)
    kept = weights != 0
    assert abs(kept.float().mean() - 0.75) < 0.01
    torch.testing.assert_close(weights[kept], attention(q, k, v)[kept] / 0.75)
    x, k, v = qkv()
    step = 1e-6 * draw(*x.shape)

    def f(y):
        torch.manual_seed(1)
        return attention(y, k, v, dropout_p=0.5, block_size=2).square().sum()

    along = (f(x + step) - f(x - step)) / 2
    torch.testing.assert_close((grad(f)(x) * step).sum(), along, rtol=1e-5, atol=0)
    torch.testing.assert_close(jvp(f, (x,), (step,))[1], along, rtol=1e-5, atol=0)
    y = x.clone().requires_grad_()
    assert_close(torch.autograd.grad(f(y), y)[0], grad(f)(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_as_good_as_the_kernel_s(dtype):
    torch.manual_seed(0)
    args = [draw(1, 2, 40, 16) for _ in range(3)]
    exact = math_attention(*args, is_causal=True)
    errors = [
        (f(*(x.to(dtype) for x in args), is_causal=True).double() - exact).abs().max()
        for f in (attention, math_attention)
    ]
    assert attention(*(x.to(dtype) for x in args)).dtype == dtype
    assert errors[0] <= 4 * errors[1]


LONG = {
    "backward": lambda f, x: f(*x).square().sum().backward(),
    "jvp": lambda f, x: jvp(f, x, x),
    "backward through a jvp": lambda f, x: jvp(f, x, x)[1].square().sum().backward(),
    "gradient penalty": lambda f, x: grad(lambda q: f(q, *x[1:]).square().sum())(x[0]).square().sum().backward(),
    "hessian-vector product": lambda f, x: jvp(grad(lambda q: f(q, *x[1:]).square().sum()), x[:1], x[:1]),
}


@pytest.mark.parametrize("name", LONG)
def test_memory_is_linear_in_the_sequence(name):
    peaks = []
    for length in (128, 512):
        x = tuple(torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))
        with PeakBytes() as alive:
            LONG[name](functools.partial(attention, is_causal=True, block_size=16), x)
        peaks.append(alive.peak)
    assert peaks[1] < 4.5 * peaks[0]  # four times the length


class Attentive(nn.Module):
    """Self-attention between two linear layers."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = self.inside(x).chunk(3, -1)
        return self.outside(attention(q, k, v, block_size=2))


@pytest.mark.world_size(2)
def test_a_sharded_module_trains_through_a_jvp_of_it():
    engine, plain = engine_of(build(Attentive), 3), build(Attentive)
    x = torch.linspace(-1, 1, 20).double().view(1, 5, 4)
    engine.backward(jvp(engine, (x,), (x.cos(),))[1].square().sum())
    jvp(plain, (x,), (x.cos(),))[1].square().sum().backward()
    assert_close(zerofunc.full_gradients(engine.module), {n: p.grad for n, p in plain.named_parameters()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": "text"}, "q: expected a floating-point tensor"),
        (
            {"k": torch.ones(2, 2, 5, 3, dtype=torch.long)},
            r"k: expected a floating-point tensor.*int64.*\(2, 2, 5, 3\)",
        ),
        ({"v": torch.ones(2, 2, 5, 3)}, "v: expected torch.float64 on cpu as q has, found torch.float32"),
        ({"k": draw(2, 2, 5, 4)}, "k: expected width 3 as q has, found 4"),
        ({"v": draw(2, 2, 4, 3)}, "v: expected 5 values, one for each key, found 4"),
        ({"k": draw(3, 2, 5, 3), "v": draw(3, 2, 5, 3)}, "expected leading dimensions that broadcast"),
        ({"q": draw(2, 4, 5, 3)}, "set enable_gqa=True"),
        ({"q": draw(2, 3, 5, 3), "enable_gqa": True}, "a number of heads that divides q's"),
        ({"attn_mask": torch.ones(5, 4, dtype=torch.bool)}, r"attn_mask: expected a shape that broadcasts to"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.int)}, "attn_mask: expected torch.bool or torch.float64"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}, "expected None with is_causal=True"),
        ({"dropout_p": 1.5}, r"dropout_p: expected a probability in \[0, 1\], found 1.5"),
        ({"block_size": 0}, "block_size: expected an integer > 0, found 0"),
        ({"block_size": 2.5}, "block_size: expected an integer > 0, found 2.5"),
    ],
)
def test_bad_input_is_named(change, message):
    q, k, v = qkv()
    with pytest.raises(ValueError, match=message):
        attention(**{"q": q, "k": k, "v": v, **change})
