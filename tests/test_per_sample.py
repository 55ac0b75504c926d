"""Per-sample gradients without holding them: norms, projections, inner products and clipped sums, at every stage."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

import zerofunc
from reference import EVERY_STAGE, STAGES, Language, Net, build, config, data
from zerofunc.per_sample.convolution import Convolution, Geometry
from zerofunc.per_sample.functions import (
    clipped_grad,
    per_sample_dots,
    per_sample_grad_norms,
    per_sample_projections,
)
from zerofunc.per_sample.ghost import Embedding, Linear
from zerofunc.per_sample.group_norm import GroupNorm
from zerofunc.per_sample.seeded import Projector, normal_part
from zerofunc.per_sample.taps import Measure, Tap, measure_gradients


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sharded(make, stage):
    return zerofunc.shard(build(make), stage, page_bytes=160, resident_bytes=0, timeout_s=20)


def gradients(fn, module, batch):
    """What everything is compared with: each sample's gradients, all of them held, {name: [B, *shape]}."""
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def loss(tree, *sample):
        return fn(lambda *args, **kwargs: torch.func.functional_call(module, tree, args, kwargs), *sample)

    grad = torch.func.grad(loss)
    rows = [grad(parameters, *(tensor[i] for tensor in batch)) for i in range(len(batch[0]))]
    return {name: torch.stack([row[name] for row in rows]) for name in parameters}


def norms_of(tree):
    return torch.cat([gradient.flatten(1) for gradient in tree.values()], 1).norm(dim=1)


def close(found, expected, rtol=1e-9, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def check_norms(make, fn, batch, module=None):
    module = module if module is not None else build(make)
    close(per_sample_grad_norms(fn, module, batch), norms_of(gradients(fn, build(make), batch)))


# ---- models ----------------------------------------------------------------------------------------------------------


def regression(model, x, y):
    return (model(x) - y).square().mean()


def next_token(model, tokens):
    return F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:])


def batch_of(rank, size):
    return data(1, rank, size, 4), data(2, rank, size, 3)


def tokens_of(rank, size):
    return (data(3, rank, size, 6).abs() * 10).long() % 7


# ---- norms -----------------------------------------------------------------------------------------------------------


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_norms_are_those_of_this_ranks_samples(stage):
    rank, _ = rank_and_size()
    batch = batch_of(rank, 3 + rank)
    check_norms(Net, regression, batch, sharded(Net, stage))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.world_size(1, 2)
def test_norms_of_an_engine_with_tied_weights_in_chunks(stage):
    engine = zerofunc.initialize(build(Language), config(stage))[0]
    rank, _ = rank_and_size()
    tokens = tokens_of(rank, 2 + 3 * rank)
    found = per_sample_grad_norms(next_token, engine, tokens, chunk_size=2)
    close(found, norms_of(gradients(next_token, build(Language), (tokens,))))


class Sequence(nn.Module):
    """Embeddings (one padded), linear layers on sequences: Gram matrices where narrow is long, products where not."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 5, padding_idx=2), nn.Embedding(6, 5)
        self.norm, self.wide, self.narrow = nn.LayerNorm(5), nn.Linear(5, 40), nn.Linear(40, 2, bias=False)
        self.head = nn.Linear(2, 7)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[-1]))
        return self.head(self.narrow(torch.tanh(self.wide(self.norm(x)))))


class Attention(nn.Module):
    """Weights read inside a function that is opaque to rules, and recurrent ones, read at every step."""

    def __init__(self):
        super().__init__()
        self.attention, self.cell = nn.MultiheadAttention(4, 2, batch_first=True), nn.GRUCell(4, 4)

    def forward(self, x):
        h = self.attention(x[None], x[None], x[None], need_weights=False)[0][0]
        state = torch.zeros_like(h[0])
        for step in h:
            state = self.cell(step, state)
        return state


class Repeated(nn.Module):
    """One layer used twice by its rule; another one both by its rule and otherwise; a bias that is shared."""

    def __init__(self):
        super().__init__()
        self.twice, self.mixed = nn.Linear(4, 4), nn.Linear(4, 3)
        self.other = nn.Linear(4, 3)
        self.other.bias = self.mixed.bias

    def forward(self, x):
        h = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.mixed(h) + self.other(h) + 0.1 * self.mixed.weight.square().sum()


class Transposed(nn.Module):
    """A linear layer as transformers' GPT-2 has it."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.addmm(self.bias, x[None], self.weight)[0]


class Conditioned(nn.Module):
    """A rule's input that is the same for all samples, with a bias that is each sample's own."""

    def __init__(self):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 3)

    def forward(self, x):
        return F.linear(torch.ones(5, 4, dtype=x.dtype), self.weight, self.shift(x)).sin().sum(0)


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class UsedByAFunction(nn.Module):
    """A weight that a rule and a custom Function use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x) + Cube.apply(self.linear.weight).sum()


@pytest.mark.parametrize("make", [Repeated, Transposed, UsedByAFunction, Conditioned])
def test_norms_are_exact_however_a_weight_is_used(make):
    check_norms(make, regression, batch_of(0, 4))


def squared(model, x):
    return model(x).square().sum()


class Convolution1d(nn.Module):
    """Of one sample without a batch dimension; the second has few positions and many channels."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 6, 3, stride=2, padding=1), nn.Conv1d(6, 8, 2, dilation=2, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Convolution2d(nn.Module):
    """Groups, every kind of padding, a frozen bias, and one layer used twice; three images in a sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=(1, 0), padding_mode="circular"),
            nn.Tanh(),
            nn.Conv2d(4, 4, (2, 3), padding="same", groups=4),  # the tap's, as it is padded on one side only
            nn.Tanh(),
            nn.Conv2d(4, 8, 3, stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2),
        )
        self.twice = nn.Conv2d(8, 8, (1, 3), padding="same", dilation=(1, 2), groups=2)
        self.last = nn.Conv2d(8, 16, (2, 3), padding="valid", groups=2)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.twice(self.twice(self.layers(torch.stack([x, x**2, x.sin()])))))


class Convolution3d(nn.Module):
    """With a group norm between, and a transposed one, which has no rule."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv3d(1, 4, 2, padding=1), nn.GroupNorm(2, 4)
        self.second, self.third = nn.Conv3d(4, 6, (3, 2, 1)), nn.ConvTranspose3d(6, 2, 2)

    def forward(self, x):
        return self.third(self.second(torch.tanh(self.norm(self.first(x[None])))))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("make", "shape"), [(Convolution1d, (2, 7)), (Convolution2d, (2, 6, 5)), (Convolution3d, (1, 3, 2, 2))]
)
def test_norms_of_convolutions(make, shape):
    check_norms(make, squared, (data(1, 0, 3, *shape),))


class GroupNorms(nn.Module):
    """Of several inputs in a sample, not contiguous, without a bias, and with a weight that has another use."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.GroupNorm(2, 4), nn.GroupNorm(1, 4), nn.GroupNorm(4, 4)
        self.third.register_parameter("bias", None)
        self.scale, self.unused = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def forward(self, x):
        h = torch.tanh(self.first(torch.stack([x, x**2]).mT))
        return self.third(torch.tanh(self.second(h)) * self.second.weight[:, None]) * self.scale


@STAGES
@pytest.mark.world_size(1)
def test_norms_of_group_norms(stage):
    check_norms(GroupNorms, squared, (data(1, 0, 3, 3, 4),), sharded(GroupNorms, stage))


@pytest.mark.parametrize("length", [1, 2, 6])
def test_norms_of_sequences(length):
    tokens = torch.arange(4 * length).view(4, length) * 5 % 7
    check_norms(Sequence, lambda model, t: model(t).log_softmax(-1)[..., 1].sum(), (tokens,))


def test_norms_of_layers_without_a_rule():
    check_norms(Attention, squared, (data(1, 0, 3, 5, 4),))


def input_gradient(model, x, y):
    return torch.func.grad(lambda x: model(x).sin().sum())(x).square().sum() + regression(model, x, y)


def input_tangent(model, x, y):
    return (torch.func.jvp(model, (x,), (y.sum() * x,))[1] - y).square().sum()


SHIFTS = data(5, 0, 3, 4)


def augmented(model, x, y):
    return torch.func.vmap(lambda shift: regression(model, x + shift, y))(SHIFTS).sum()


@pytest.mark.parametrize("fn", [input_gradient, input_tangent, augmented])
def test_norms_of_losses_that_contain_transforms(fn):
    check_norms(Net, fn, batch_of(0, 3))


def test_norms_under_autocast_and_in_low_precision():
    x, y = (tensor.float() for tensor in batch_of(0, 4))
    net = build(Net).float()

    def fn(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x[None])[0].float(), y)

    close(per_sample_grad_norms(fn, net, (x, y)), norms_of(gradients(fn, net, (x, y))), rtol=0.02)
    low, expected = net.bfloat16(), norms_of(gradients(regression, net.float(), (x, y)))
    found = per_sample_grad_norms(regression, low.bfloat16(), (x.bfloat16(), y.bfloat16()))
    assert found.dtype == torch.float32
    close(found, expected, rtol=0.05)


def test_a_batch_is_any_tree():
    x, y = batch_of(0, 3)
    expected = per_sample_grad_norms(regression, build(Net), [x, y])

    def of_dict(model, sample):
        return regression(model, sample["x"], sample["y"]) * sample["weight"]

    close(per_sample_grad_norms(of_dict, build(Net), {"x": x, "y": y, "weight": 1.0}), expected)


def test_frozen_and_evaluated():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double()
    net[0].bias.requires_grad_(False)
    net.eval()
    batch = batch_of(0, 3)

    def fn(model, x, y):
        return (model(x[None])[0] - y).square().sum()

    expected = gradients(fn, net, batch)
    assert list(expected) == ["0.weight", "1.weight", "1.bias"]
    close(per_sample_grad_norms(fn, net, batch), norms_of(expected))


# ---- the building blocks ---------------------------------------------------------------------------------------------


NOT_ONLY = torch.zeros((), dtype=torch.float64), lambda: False  # an accumulator, and another use of the weight
X, CHANNELS, INDICES = data(4, 0, 3, 4), data(4, 0, 2, 2, 5), torch.tensor([1, 0, 1])
FUNCTIONS = {
    "tap": (lambda w: Tap.apply(NOT_ONLY[0], torch.sum, w)[0], lambda w: w),
    "linear": (lambda w: Linear.apply(X, w, w[:, 0], *NOT_ONLY), lambda w: F.linear(X, w, w[:, 0])),
    "embedding": (lambda w: Embedding.apply(INDICES, w, -1, *NOT_ONLY), lambda w: w[INDICES]),
    "convolution": (
        lambda w: Convolution.apply(CHANNELS, w.view(3, 2, 2), w[:, 0], Geometry([2], [1], [1], 1), *NOT_ONLY),
        lambda w: F.conv1d(CHANNELS, w.view(3, 2, 2), w[:, 0], 2, 1),
    ),
    "group_norm": (
        lambda w: GroupNorm.apply(2, 0.1, w[..., None] * X[0], w[0], w[1]),
        lambda w: F.group_norm(w[..., None] * X[0], 2, w[0], w[1], 0.1),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_every_derivative(name):
    """Outside of a measurement their values and tangents are those of the operator, and the rules' gradients too."""
    function, plain = FUNCTIONS[name]
    w, v = data(1, 0, 3, 4), data(2, 0, 3, 4)

    def loss(f):
        return lambda w: f(w).sin().sum()

    close(function(w), plain(w))
    close(torch.func.jvp(function, (w,), (v,)), torch.func.jvp(plain, (w,), (v,)))
    close(torch.func.vmap(function)(torch.stack([w, v])), torch.stack([plain(w), plain(v)]))
    if name != "tap":  # which passes no gradient on
        close(torch.func.grad(loss(function))(w), torch.func.grad(loss(plain))(w))
        for outer in (torch.func.jvp, lambda f, p, t: torch.func.vjp(f, *p)[1](*t)):
            found = outer(torch.func.grad(loss(function)), (w,), (v,))
            close(found[-1], outer(torch.func.grad(loss(plain)), (w,), (v,))[-1])


def test_a_tap_measures_the_gradient_of_its_parameter():
    def loss(accumulator, w, x):
        return (Tap.apply(accumulator, lambda g: g.square().sum(), w)[0] * x).sin().sum()

    w, x = data(1, 0, 4), data(2, 0, 3, 4)
    zero = torch.zeros((), dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(loss), (None, None, 0))(zero, w, x)
    close(found, ((w * x).cos() * x).square().sum(1))


# ---- projections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rademacher", "normal"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(1, 2)
def test_projections_are_the_same_at_every_stage_and_on_any_number_of_ranks(stage, kind):
    rank, _ = rank_and_size()
    batch, projector = batch_of(rank, 2 + rank), Projector(8, seed=3, kind=kind)
    found = per_sample_projections(regression, sharded(Net, stage), batch, projector, chunk_size=2)
    tree = gradients(regression, build(Net), batch)
    expected = [
        sum(projector.project(name, gradient[i]) for name, gradient in tree.items()) for i in range(len(batch[0]))
    ]
    close(found, torch.stack(expected))


@pytest.mark.parametrize("kind", ["rademacher", "normal"])
def test_projections_keep_inner_products_on_average(kind):
    """Over blocks: the projection's matrix is drawn in several, and its rows are independent."""
    a, b = data(1, 0, 5000), data(2, 0, 5000)
    a, b = a / a.norm(), (a / a.norm() + b / b.norm()) / 2**0.5
    projected = [Projector(1024, seed=1, kind=kind).project("w", tensor) for tensor in (a, b)]
    assert abs(projected[0].norm() - 1) < 0.1
    assert abs(projected[0] @ projected[1] - a @ b) < 0.1
    assert abs(Projector(1024, seed=1, kind=kind).project("v", a) @ projected[0]) < 0.1


# ---- inner products --------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(1, 2)
def test_inner_products_with_a_sharded_vector(stage):
    rank, _ = rank_and_size()
    module, batch = sharded(Net, stage), batch_of(rank, 3 * rank + 1)
    full = {name: data(7, 0, *p.shape) for name, p in build(Net).named_parameters()}
    found = per_sample_dots(regression, module, batch, zerofunc.reshard(module, full), chunk_size=2)
    tree = gradients(regression, build(Net), batch)
    expected = sum((gradient * full[name]).flatten(1).sum(1) for name, gradient in tree.items())
    close(found, expected)
    close(per_sample_dots(regression, build(Net), batch, full), expected)


# ---- clipped gradients -----------------------------------------------------------------------------------------------


def clipped(fn, module, batch, max_norm):
    """The clipped sum with every gradient held."""
    tree = gradients(fn, module, batch)
    factors = (max_norm / (norms_of(tree) + 1e-6)).clamp(max=1)
    assert (factors < 1).any()
    return {name: torch.einsum("b,b...->...", factors, gradient) for name, gradient in tree.items()}


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_clipped_gradient_is_over_all_ranks_samples(stage):
    """Ranks have different numbers of samples, and the first one none if there are two."""
    rank, size = rank_and_size()
    module, counts = sharded(Net, stage), [4] if size == 1 else [0, 5]
    batches = [batch_of(r, count) for r, count in enumerate(counts)]
    found = zerofunc.unshard(module, clipped_grad(regression, module, batches[rank], 0.3, chunk_size=2))
    everything = tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))
    expected = clipped(regression, build(Net), everything, 0.3)
    close(found, {name: gradient / sum(counts) for name, gradient in expected.items()})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(1, 2)
def test_noise_is_added_once_and_is_the_same_on_any_number_of_ranks(stage):
    module, nothing = sharded(Net, stage), batch_of(0, 0)
    generator = torch.Generator().manual_seed(5)
    found = clipped_grad(regression, module, nothing, 0.3, 2.0, generator, batch_size=10)
    plain = clipped_grad(regression, build(Net), nothing, 0.3, 2.0, generator.manual_seed(5), batch_size=10)
    close(zerofunc.unshard(module, found), plain)
    again = clipped_grad(regression, build(Net), nothing, 0.3, 2.0, generator, batch_size=10)
    assert all((again[name] != plain[name]).all() for name in plain)


def test_noise_is_standard_normal_in_any_cut():
    like = torch.zeros((), dtype=torch.float64)
    whole = normal_part(1, "w", 0, 20_000, like)
    assert abs(whole.mean()) < 0.03
    assert abs(whole.std() - 1) < 0.02
    pieces = [normal_part(1, "w", *cut, like) for cut in ((0, 0), (0, 7), (7, 9000), (9000, 20_000))]
    close(torch.cat(pieces), whole)
    assert not torch.equal(normal_part(1, "v", 0, 8, like), whole[:8])


@pytest.mark.world_size(2)
def test_without_a_generator_ranks_agree_on_the_noise():
    torch.manual_seed(dist.get_rank())
    module = sharded(Net, 0)
    found = clipped_grad(regression, module, batch_of(0, 1), 0.3, 1.0)
    everyone = [None, None]
    dist.all_gather_object(everyone, found)
    close(everyone[0], everyone[1])


class Dropped(Net):
    def forward(self, x):
        return self.head(F.dropout(self.encode(x), 0.5, self.training))


@pytest.mark.parametrize("stage", [3])
@pytest.mark.world_size(1, 2)
def test_norms_and_gradient_see_the_same_dropout(stage):
    """A clipped sum of one sample is as long as the limit, whatever was dropped."""
    rank, _ = rank_and_size()
    module, batch = sharded(Dropped, stage), batch_of(0, 1 if rank == 0 else 0)
    lengths = []
    for _ in range(4):
        found = clipped_grad(regression, module, batch, 1e-3)
        lengths.append(zerofunc.vdot(found, found, module).sqrt().item())
    assert max(abs(length - 1e-3) for length in lengths) < 1e-5
    repeated = per_sample_grad_norms(regression, build(Dropped), [t[:1].expand(8, -1) for t in batch_of(0, 1)])
    assert len(set(repeated.tolist())) > 1


# ---- Opacus ----------------------------------------------------------------------------------------------------------


def classifier():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def classification(model, x, label):
    return F.cross_entropy(model(x[None]), label[None])


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_norms_and_clipped_gradients_equal_opacus():
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping  # takes seconds

    x, labels = data(1, 0, 5, 1, 6, 6), torch.tensor([0, 2, 1, 1, 0])
    ghost = GradSampleModuleFastGradientClipping(build(classifier), loss_reduction="mean")
    F.cross_entropy(ghost(x), labels).backward()
    held = GradSampleModule(build(classifier), loss_reduction="sum")
    F.cross_entropy(held(x), labels, reduction="sum").backward()
    module = sharded(classifier, 3)
    close(per_sample_grad_norms(classification, module, (x, labels)), ghost.get_norm_sample())

    factors = (0.5 / (ghost.get_norm_sample() + 1e-6)).clamp(max=1)
    expected = {
        name.removeprefix("_module."): torch.einsum("b,b...->...", factors, p.grad_sample) / 5
        for name, p in held.named_parameters()
    }
    close(zerofunc.unshard(module, clipped_grad(classification, module, (x, labels), 0.5)), expected)


# ---- bad input -------------------------------------------------------------------------------------------------------


def refused(match, function, *args, **kwargs):
    with pytest.raises(ValueError, match=match):
        function(*args, **kwargs)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.world_size(1, 2)
def test_bad_input_is_refused_on_every_rank(stage):
    module, (x, y) = sharded(Net, stage), batch_of(0, 3)
    rank, size = rank_and_size()
    vector = dict(zerofunc.shards(module))
    refused(r"lengths \[3, 2\]", per_sample_grad_norms, regression, module, (x, y[:2]))
    refused("no tensors", per_sample_grad_norms, regression, module, ())
    refused("without dimensions", per_sample_grad_norms, regression, module, (x, torch.ones(())))
    refused("chunk_size is 0", per_sample_grad_norms, regression, module, (x, y), chunk_size=0)
    refused("fn returned torch.float64 of shape", per_sample_grad_norms, lambda model, x, y: model(x), module, (x, y))
    refused("fn returned NoneType", per_sample_grad_norms, lambda model, x, y: None, module, (x, y))
    refused("expected a zerofunc.Projector", per_sample_projections, regression, module, (x, y), 8)
    refused("names", per_sample_dots, regression, module, (x, y), {"first.weight": vector["first.weight"]})
    short = {name: part[:0] if name == "head.weight" else part.detach() for name, part in vector.items()}
    if size == 1 or vector["head.weight"].numel():
        refused("'head.weight'", per_sample_dots, regression, module, (x, y), short)
    else:  # it fits here, but not on the other rank
        refused("another rank", per_sample_dots, regression, module, (x, y), short)
    single = {name: part.detach().float() for name, part in vector.items()}
    refused("float32", per_sample_dots, regression, module, (x, y), single)
    refused("max_norm is 0", clipped_grad, regression, module, (x, y), 0)
    refused("noise_multiplier is -1", clipped_grad, regression, module, (x, y), 1.0, -1)
    refused("batch_size is 0", clipped_grad, regression, module, (x, y), 1.0, batch_size=0)
    refused("no rank has a sample", clipped_grad, regression, module, (x[:0], y[:0]), 1.0)
    bad = (x, y[:2]) if rank == size - 1 else (x, y)
    refused("lengths" if rank == size - 1 else "another rank", per_sample_grad_norms, regression, module, bad)
    check_norms(Net, regression, (x, y), module)


def test_bad_input_of_plain_modules_and_projectors():
    x, y = batch_of(0, 3)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    refused("'1' is a BatchNorm1d in training mode", per_sample_grad_norms, regression, net, (x, y))
    refused("no trainable parameters", per_sample_grad_norms, regression, nn.Tanh(), (x, y))
    refused("dim is 0", Projector, 0)
    refused("kind is 'sparse'", Projector, 4, kind="sparse")
    refused("seed is 'a'", Projector, 4, seed="a")


# ---- memory ----------------------------------------------------------------------------------------------------------


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of any tensor made inside."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result


def test_no_per_sample_gradient_is_formed_by_rules():
    net, (x, y) = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30)).double(), data(1, 0, 2, 9, 30)
    with Largest() as largest:
        per_sample_grad_norms(regression, net, (x, y))
    assert largest.numel < 9 * 30 * 40


@pytest.mark.parametrize(("size", "width"), [(12, 8), (3, 32)])  # by gradients of a few samples, by ghost norms
def test_few_per_sample_gradients_of_a_convolution_are_formed_at_once(size, width):
    net, x = nn.Conv1d(width, width, 5, padding=2).double(), data(1, 0, 40, width, size)
    with Largest() as largest:
        found = per_sample_grad_norms(squared, net, (x,))
    assert largest.numel <= 2 * x.numel() < 40 * net.weight.numel()
    close(found, norms_of(gradients(squared, net, (x,))))


class Noted(Cube):
    """The identity; its backward takes a note."""

    @staticmethod
    def forward(x, note):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.note = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return gradient, None


def test_a_gradient_is_measured_before_the_next_is_formed():
    weights = {name: data(step, 0, 65, 65) for step, name in enumerate("abc", 1)}  # not small
    notes = []

    def measured(name, gradient):
        notes.append(f"measure of {name}")
        return gradient.square().sum()

    def loss(weights, x):
        for name, weight in weights.items():
            x = Noted.apply(torch.tanh(x @ weight), functools.partial(notes.append, f"backward of {name}"))
        return x.sum()

    measure = Measure(torch.zeros((), dtype=torch.float64), measured)
    measure_gradients(loss, lambda tapped: tapped, weights, [data(4, 0, 2, 65)], measure)
    assert notes == [f"{step} of {name}" for name in "cba" for step in ("backward", "measure")]
