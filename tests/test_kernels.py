"""Kernels are chosen by what is differentiated: right under every transform, and PyTorch's fused ones otherwise."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

import zerofunc
from reference import data, engine_of
from zerofunc import second_order
from zerofunc.kernels.composites import COMPOSITES

STAGES = pytest.mark.parametrize("stage", [0, 3])


def build(make, stage=None, **options):
    """The same layer each time, in float64; sharded where a stage is given."""
    torch.manual_seed(0)
    module = make().double()
    return module if stage is None else zerofunc.shard(module, stage, **options)


class Operators(TorchDispatchMode):
    """Names of the operators that ran inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


class Attend(nn.Module):
    """Attention by PyTorch's function, on two heads."""

    def __init__(self, causal=True):
        super().__init__()
        self.qkv, self.causal = nn.Linear(4, 12), causal

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(-3, -2).flatten(-2)


class Norms(nn.Module):
    """LayerNorm as a module and as a function, in a submodule."""

    class Inner(nn.Module):
        def forward(self, x):
            return F.layer_norm(x.sin(), (4,))

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.norm = nn.Linear(4, 4), Norms.Inner(), nn.LayerNorm(4)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.norm(self.inner(self.first(x)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True)
        self.layers, self.attention = nn.TransformerEncoder(layer, 1), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.layers(x)
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.layer = kind(4, 3, num_layers=2, bidirectional=True, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0]


class Packed(Recurrent):
    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [2, 3], batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class ChannelsLast(nn.Module):
    """GroupNorm of an input whose channels are last, which PyTorch has no forward mode for."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.GroupNorm(2, 2)

    def forward(self, x):
        images = self.first(x).unflatten(-1, (2, 2)).movedim(2, -1).contiguous().movedim(-1, 1)
        return self.norm(images).flatten(1)


MODELS = {
    "norms": Norms,
    "channels last": ChannelsLast,
    "attention": Attend,
    "encoder": Encoder,
    "encoder in evaluation": lambda: Encoder().eval(),
    "lstm": Recurrent,
    "lstm with projections": lambda: Recurrent(proj_size=2),
    "gru without biases": lambda: Recurrent(nn.GRU, bias=False),
    "rnn": lambda: Recurrent(nn.RNN),
    "packed lstm": Packed,
}

# The rest differ from these in the layer only, and docs/operators.py has them all.
QUICK = {"norms", "channels last", "attention", "encoder in evaluation", "lstm", "packed lstm"}
NAMES = pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])


def point(*shape):
    return data(0, 0, *(shape or (2, 3, 4)))


def direction():
    return data(1, 0, 2, 3, 4)


def second_difference(f, u, v, h=1e-4):
    """The second derivative of a scalar function along two directions, from its values."""
    x = point()
    with torch.no_grad():
        return sum(a * b * f(x + h * (a * u + b * v)) for a in (1, -1) for b in (1, -1)) / (4 * h * h)


def energy(model):
    return lambda x: model(x).sin().sum()


@pytest.mark.world_size(1)
@NAMES
def test_second_derivatives_equal_differences_of_the_forward(name):
    f, x = energy(build(MODELS[name], 3)), point()
    u, v = direction(), data(2, 0, 2, 3, 4)
    expected = second_difference(f, u, v)
    recorded = x.clone().requires_grad_()
    jvp(f, (recorded,), (v,))[1].backward()
    along = {
        "backward through a jvp": (recorded.grad * u).sum(),
        "jvp of a gradient": (jvp(grad(f), (x,), (v,))[1] * u).sum(),
        "gradient of a gradient": (grad(lambda x: (grad(f)(x) * v).sum())(x) * u).sum(),
        "gradient of a jvp": (grad(lambda x: jvp(f, (x,), (v,))[1])(x) * u).sum(),
        "jvp of a jvp": jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (u,))[1],
        "by a dual number": _through_a_dual_number(f, x, u, v),
    }
    for how, found in along.items():
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, how=how: f"{how}: {text}")


def _through_a_dual_number(f, x, u, v):
    x = x.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent
        return (torch.autograd.grad(tangent, x)[0] * u).sum()


@pytest.mark.world_size(1)
@NAMES
def test_vmap_equals_one_by_one(name):
    model, x = build(MODELS[name], 3), torch.stack([point(), direction()])
    f = energy(model)
    torch.testing.assert_close(vmap(model)(x), torch.stack([model(a) for a in x]))
    torch.testing.assert_close(vmap(grad(f))(x), torch.stack([grad(f)(a) for a in x]))


@pytest.mark.world_size(2)
@STAGES
@pytest.mark.parametrize("make", [Norms, Attend, Recurrent])
def test_training_on_a_jvp_and_a_gradient_equals_composed_plain_pytorch(make, stage):
    """The mean over ranks of a loss with a jvp and a gradient penalty inside."""

    def loss(model, rank):
        x, v = data(3, rank, 2, 3, 4), data(4, rank, 2, 3, 4)
        y, tangent = jvp(model, (x,), (v,))
        return (y - tangent).square().mean() + grad(energy(model))(x).square().mean()

    engine, model = engine_of(build(make), stage), build(make)
    engine.backward(loss(engine, dist.get_rank()))
    found = zerofunc.full_gradients(engine.module)
    with second_order():
        torch.stack([loss(model, rank) for rank in range(2)]).mean().backward()
    torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()}, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_composites_equal_pytorch_and_its_gradients(name):
    model, x = build(MODELS[name]), point()
    parameters = dict(model.named_parameters())

    def gradients():
        loss = functional_call(model, parameters, (x,)).sin().sum()
        return loss, *torch.autograd.grad(loss, list(parameters.values()))

    expected = gradients()
    with second_order():
        torch.testing.assert_close(gradients(), expected, rtol=1e-9, atol=1e-11)


OPTIONS = {
    "a mask": lambda q: {"attn_mask": torch.ones(3, 3, dtype=torch.bool).tril()},
    "a query that may see nothing": lambda q: {"attn_mask": torch.ones(3, 3, dtype=torch.bool).tril(-1)},
    "a bias": lambda q: {"attn_mask": q[0, 0] @ q[0, 0].mT},
    "a scale": lambda q: {"scale": 0.3, "is_causal": True},
    "grouped heads": lambda q: {"enable_gqa": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_composed_attention_equals_the_math_kernel(option):
    q = point(2, 4, 3, 5)
    k = v = q[:, :2] if option == "grouped heads" else q.sin()
    options = OPTIONS[option](q)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, **options)
    composed = COMPOSITES[F.scaled_dot_product_attention]
    torch.testing.assert_close(composed(q, k, v, **options), expected)
    second = hessian(lambda q: composed(q, q.sin(), q.cos(), is_causal=True).sum())(q[:1, :1])
    assert second.isfinite().all()


def test_composed_losses_equal_pytorch():
    x, classes, weight = point(5, 4), torch.tensor([0, 3, 1, 1, 2]), torch.tensor([0.2, 1, 3, 0.5]).double()
    for reduction in ("mean", "sum", "none"):
        for options in ({}, {"weight": weight}, {"label_smoothing": 0.2, "ignore_index": 1, "weight": weight}):
            for target in (classes, x.softmax(-1)):
                if target.is_floating_point() and "ignore_index" in options:
                    options = {k: v for k, v in options.items() if k != "ignore_index"}
                expected = F.cross_entropy(x, target, reduction=reduction, **options)
                with second_order():
                    found = F.cross_entropy(x, target, reduction=reduction, **options)
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_composites_keep_the_data_type(dtype):
    x = point(2, 3, 4).to(dtype)
    for f in (lambda x: F.layer_norm(x, (4,)), lambda x: F.rms_norm(x, (4,)), lambda x: x.softmax(-1)):
        with second_order():
            found = f(x)
        torch.testing.assert_close(found, f(x))


# -- when --------------------------------------------------------------------------------------------------------------

FUSED = {
    Norms: "native_layer_norm",
    Attend: "_scaled_dot_product_flash_attention_for_cpu",
}


@pytest.mark.world_size(1)
@STAGES
@pytest.mark.parametrize("make", FUSED)
def test_first_order_keeps_the_fused_kernel(make, stage):
    model, x = build(make, stage), point()

    def training():
        model(x).sum().backward()

    def first_order_gradient():
        with torch.no_grad():
            grad(energy(model))(x)

    for run in (training, first_order_gradient, lambda: vmap(model)(x[None])):
        jvp(model, (x,), (x,))  # leaves no trace
        with Operators() as operators:
            run()
        assert FUSED[make] in operators.names
    for run in (lambda: jvp(model, (x,), (x,)), lambda: grad(lambda a: jvp(model, (a,), (x,))[1].sum())(x)):
        with Operators() as operators:
            run()
        assert FUSED[make] not in operators.names


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_right_until_a_tangent_is_differentiated_stays_fused_until_then(stage):
    """LayerNorm in reverse over reverse, and in a Hessian product that nothing differentiates again."""
    model, x = build(Norms, stage), point()
    attending = build(Attend, stage)
    with Operators() as operators, torch.no_grad():
        jacrev(jacrev(model))(x)
        jvp(grad(energy(model)), (x,), (x,))
    assert FUSED[Norms] in operators.names
    with Operators() as operators:
        grad(energy(attending))(x)
        jacrev(jacrev(attending))(x)
    assert FUSED[Attend] not in operators.names
    with Operators() as operators, torch.no_grad():
        grad(lambda a: jvp(model, (a,), (x,))[1].sum())(x)
        jvp(lambda a: jvp(model, (a,), (x,))[1], (x,), (x,))
    assert FUSED[Norms] not in operators.names


class Forces(nn.Module):
    """A potential whose forward differentiates itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def energy(self, x):
        return self.inner(x).sin().sum()

    def forward(self, x):
        return grad(self.energy)(x), jvp(self.energy, (x,), (x,))[1]


@pytest.mark.world_size(1)
@STAGES
def test_a_transform_may_begin_inside_forward(stage):
    model = build(lambda: Forces(Norms()), stage)
    f = energy(model.inner)
    x = point().requires_grad_()
    forces, work = model(x)
    u = direction()
    (found,) = torch.autograd.grad(work, x)
    x = x.detach()
    torch.testing.assert_close(work.detach(), (forces.detach() * x).sum())
    # work(x) = f'(x) x, whose derivative along u is f''(x)[x, u] + f'(x) u
    torch.testing.assert_close((found * u).sum(), second_difference(f, u, x) + (forces * u).sum(), rtol=1e-5, atol=1e-6)


class FunctionalForces(nn.Module):
    """A potential without submodules, whose forward differentiates its own operators."""

    def __init__(self, recorded):
        super().__init__()
        self.weight, self.recorded = nn.Parameter(torch.randn(4, 4)), recorded

    def forward(self, x):
        def energy(x):
            return F.layer_norm(torch.cdist(x, x) @ x @ self.weight, (4,)).sin().sum()

        if self.recorded:
            return torch.autograd.grad(energy(x), x, create_graph=True)[0]
        return jvp(energy, (x,), (torch.ones_like(x),))[1]


@pytest.mark.world_size(1)
@STAGES
@pytest.mark.parametrize("recorded", [True, False])
def test_a_module_may_differentiate_its_own_operators(recorded, stage):
    model, reference = (build(lambda: FunctionalForces(recorded), s) for s in (stage, None))
    x = point().requires_grad_()
    (found,) = torch.autograd.grad(model(x).sin().sum(), x)
    with second_order():
        (expected,) = torch.autograd.grad(reference(x).sin().sum(), x)
    torch.testing.assert_close(found, expected)
    assert _get_current_function_mode_stack() == []


@pytest.mark.world_size(1)
def test_a_submodule_called_directly_chooses_too():
    model = build(lambda: nn.Sequential(nn.Linear(4, 4), Norms()), 3)
    f, u, v, x = energy(model[1]), direction(), data(2, 0, 2, 3, 4), point().requires_grad_()
    jvp(f, (x,), (v,))[1].backward()
    torch.testing.assert_close((x.grad * u).sum(), second_difference(f, u, v), rtol=1e-5, atol=1e-6)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x, depth=2):
        if depth:
            return self.norm(self(x, depth - 1))
        raise KeyError("on purpose")


@pytest.mark.world_size(1)
def test_an_exception_leaves_nothing_behind():
    model = build(Fails, 3)
    x = point()
    for _ in range(2):
        with pytest.raises(KeyError, match="on purpose"):
            jvp(model, (x,), (x,))
        assert _get_current_function_mode_stack() == []
    with Operators() as operators:
        model.norm(x)
    assert "native_layer_norm" in operators.names


@pytest.mark.world_size(1)
def test_copies_and_pickles_choose_too():
    model, x = build(Norms, 3), point()
    expected = jvp(model, (x,), (x,))
    torch.testing.assert_close(jvp(copy.deepcopy(model), (x,), (x,)), expected)
    plain = pickle.loads(pickle.dumps(copy.deepcopy(build(Norms, 0))))
    torch.testing.assert_close(jvp(plain, (x,), (x,)), expected)
    torch.testing.assert_close(
        jvp(lambda x: functional_call(model, dict(plain.named_parameters()), x), (x,), (x,)), expected
    )


# -- what cannot be seen in advance ------------------------------------------------------------------------------------


def penalty(engine):
    x = point().requires_grad_()
    return torch.autograd.grad(engine(x).sum(), x, create_graph=True)[0].square().mean()


@pytest.mark.world_size(1)
@STAGES
def test_create_graph_needs_the_option_and_the_error_says_so(stage):
    engine = engine_of(build(Attend), stage)
    with pytest.raises(RuntimeError, match=r"second_order\(\).*second_order\": true"):
        engine.backward(penalty(engine))

    reference = build(Attend)
    with second_order():
        penalty(reference).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    with second_order():
        loss = penalty(engine)
    engine.backward(loss)
    torch.testing.assert_close(zerofunc.full_gradients(engine.module), expected)
    engine = engine_of(build(Attend), stage, zerofunc={"second_order": True})
    engine.backward(penalty(engine))
    torch.testing.assert_close(zerofunc.full_gradients(engine.module), expected)


@pytest.mark.world_size(1)
@STAGES
def test_weight_norm_is_right_in_plain_second_derivatives(stage):
    """PyTorch's own is wrong there, silently, so nobody would think of the option."""
    make = lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))  # noqa: E731
    model, x = build(make, stage), point()
    weight = model.parametrizations.weight.original1
    v = data(5, 0, *weight.shape)

    def slope(model):
        weight = model.parametrizations.weight.original1
        return (torch.autograd.grad(model(x).sin().sum(), weight, create_graph=True)[0] * v).sum()

    (found,) = torch.autograd.grad(slope(model), weight)
    plain = build(make)

    def shifted(h):
        with torch.no_grad():
            plain.parametrizations.weight.original1.add_(v, alpha=h)
        return slope(plain).detach()

    h = 1e-6
    torch.testing.assert_close((found * v).sum(), (shifted(h) - shifted(-2 * h)) / (2 * h), rtol=1e-6, atol=1e-7)


class BatchNorm(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(3)


class Counting(nn.Module):
    """Any buffer that a forward writes to."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total.add_(x.sum())
        return x * self.scale


@pytest.mark.world_size(1)
@STAGES
@pytest.mark.parametrize("make", [BatchNorm, Counting])
def test_a_refused_buffer_update_names_the_module_and_the_ways_out(make, stage):
    model, x = build(lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.Sequential(nn.Tanh(), make())), stage), point()
    kind = make.__name__
    for transform in (lambda: grad(energy(model))(x), lambda: jvp(model, (x,), (x,)), lambda: vmap(model)(x[None])):
        with pytest.raises(RuntimeError, match=rf"module '1\.1' \({kind}\).*\.eval\(\).*GroupNorm.*PyTorch said"):
            transform()
    if make is BatchNorm:
        model.eval()
        assert grad(energy(model))(x).isfinite().all()


@pytest.mark.world_size(1)
def test_batch_norm_under_dual_numbers_keeps_its_statistics():
    model, plain = build(BatchNorm, 0), build(BatchNorm)
    with forward_ad.dual_level():
        model(forward_ad.make_dual(point(), direction()))
    plain(point())
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


# -- models of others --------------------------------------------------------------------------------------------------


def tiny_gpt2():
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=2, attn_implementation="sdpa")
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2Model(config)


@pytest.mark.world_size(1)
@STAGES
def test_a_transformers_model_with_sdpa_and_layer_norm(stage):
    model = build(tiny_gpt2, stage)
    f = lambda x: model(inputs_embeds=x).last_hidden_state.sin().sum()  # noqa: E731
    u, v, x = direction(), data(2, 0, 2, 3, 4), point().requires_grad_()
    with Operators() as operators:
        f(x).backward()
    assert {"native_layer_norm", "_scaled_dot_product_flash_attention_for_cpu"} <= operators.names
    x = point().requires_grad_()
    tangent = jvp(f, (x,), (v,))[1]
    h = 1e-6
    with torch.no_grad():
        torch.testing.assert_close(tangent, (f(x + h * v) - f(x - h * v)) / (2 * h), rtol=1e-6, atol=1e-6)
    tangent.backward()
    torch.testing.assert_close((x.grad * u).sum(), second_difference(f, u, v), rtol=1e-5, atol=1e-6)
