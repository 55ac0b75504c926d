"""zerofunc.checkpoint: every derivative is that of the function itself, and little is kept for it."""

import copy
import functools
import pickle
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import zerofunc
from reference import STAGES, build, data, engine_of
from zerofunc import checkpoint, checkpoint_module
from zerofunc.verify.models import Composed, Fused


class Block(nn.Module):
    """A residual block with a buffer and a parameter that is not used."""

    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.idle = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Deep(nn.Module):
    """Blocks called through ``call(block, x)``: that is where checkpoints come in."""

    def __init__(self, call=None, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.call = call

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x) if self.call else block(x)
        return x


def nested(block, x):
    """A checkpoint in a checkpoint, which closes over the module."""
    return checkpoint(lambda y: checkpoint(block, y), x)


# -- derivatives over inputs and parameters ----------------------------------------------------------------------------


def squares(f):
    return lambda x: f(x).square().sum()


def by_forward_ad(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent


def twice_by_autograd(f, x):
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(squares(f)(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


OVER_INPUTS = {
    "value": lambda f, x: f(x),
    "grad": lambda f, x: grad(squares(f))(x),
    "vjp": lambda f, x: vjp(f, x)[1](x)[0],
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "linearize": lambda f, x: linearize(f, x)[1](x.cos()),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(squares(f))(x),
    "reverse over forward": lambda f, x: grad(lambda y: jvp(squares(f), (y,), (x.cos(),))[1])(x),
    "reverse over reverse": lambda f, x: grad(lambda y: grad(squares(f))(y).square().sum())(x),
    "third order": lambda f, x: grad(lambda z: jvp(grad(squares(f)), (z,), (x.cos(),))[1].square().sum())(x),
    "jacrev twice": lambda f, x: jacrev(jacrev(lambda y: f(y)[0, :2]))(x),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap(grad)": lambda f, x: vmap(grad(squares(f)))(x),
    "vmap(hessian)": lambda f, x: vmap(hessian(squares(f)))(x),
    "vmap(vmap(grad))": lambda f, x: vmap(vmap(lambda a, b: grad(squares(f))(a * b), (None, 0)), (0, None))(x, x),
    "forward_ad": by_forward_ad,
    "forward_ad over grad": lambda f, x: by_forward_ad(grad(squares(f)), x),
    "forward_ad over vmap": lambda f, x: by_forward_ad(vmap(f), x),
    "autograd.grad twice": twice_by_autograd,
}
LOSSES = {
    "ordinary": lambda f, x: f(x).square().sum(),
    "gradient penalty": lambda f, x: grad(squares(f))(x).square().sum() + f(x).sum(),
    "gradient penalty by autograd": lambda f, x: torch.autograd.grad(
        squares(f)(x := x.clone().requires_grad_()), x, create_graph=True
    )[0].square().sum(),
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),))[1].square().sum(),
    "jvp by forward_ad": lambda f, x: by_forward_ad(f, x).square().sum(),
    "Laplacian": lambda f, x: vmap(hessian(squares(f)))(x).diagonal(dim1=1, dim2=2).square().sum(),
    "used twice": lambda f, x: (f(x) * f(x.sin())).sum(),
}  # fmt: skip


def parameter_gradients(model, x):
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(p, a):
        return functional_call(model, p, (a,)).square().sum()

    def hessian_vector(p):
        return jvp(grad(loss), (p, x), (p, x))[1]

    return [grad(loss)(plain, x), vmap(grad(loss), (None, 0))(plain, x[:, None]), hessian_vector(plain)]


def gradients_of(model, loss, x):
    model.zero_grad()
    loss(model, x).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_close(found, expected, name=""):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda message: f"{name}: {message}")


@pytest.mark.parametrize("call", [checkpoint, nested])
def test_every_derivative_is_that_of_the_function(call):
    model, plain, x = build(lambda: Deep(call)), build(Deep), data(0, 0)[:3]
    for name, derivative in OVER_INPUTS.items():
        assert_close(derivative(model, x), derivative(plain, x), name)
    assert_close(parameter_gradients(model, x), parameter_gradients(plain, x))
    for name, loss in LOSSES.items():
        assert_close(gradients_of(model, loss, x), gradients_of(plain, loss, x), name)


def with_jvp_on_top(derivative, model, x):
    return jvp(lambda x: derivative(model, x), (x,), (x.cos(),))


def with_dual_numbers_on_top(derivative, model, x):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(derivative(model, forward_ad.make_dual(x, x.cos()))))


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Mish, nn.GELU, nn.Hardswish, nn.ELU, nn.Softplus])
def test_a_gradient_whose_fused_kernel_has_no_tangent_is_pushed_forward(activation):
    plain = build(lambda: nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 3)))
    model, x = functools.partial(checkpoint, plain), data(0, 0)[:3]

    def gradient(model, x):
        return grad(squares(model))(x)

    for push in (with_jvp_on_top, with_dual_numbers_on_top):
        assert_close(push(gradient, model, x), push(gradient, plain, x), push.__name__)
    per_sample = vmap(lambda x: with_jvp_on_top(gradient, model, x))(x)
    assert_close(per_sample, vmap(lambda x: with_jvp_on_top(gradient, plain, x))(x))


def check_sharded(stage, over_inputs, losses):
    """All ranks have the same data, so that the mean of their gradients is that of one process."""
    engine, plain, x = engine_of(build(lambda: Deep(checkpoint)), stage), build(Deep), data(0, 0)[:3]
    for name in over_inputs:
        assert_close(OVER_INPUTS[name](engine, x), OVER_INPUTS[name](plain, x), name)
    assert_close(parameter_gradients(engine.module, x), parameter_gradients(plain, x))
    for name in losses:
        engine.backward(LOSSES[name](engine, x))
        assert_close(zerofunc.full_gradients(engine.module), gradients_of(plain, LOSSES[name], x), name)
        engine.zero_grad()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_sharded_module_has_the_same_derivatives(stage):
    check_sharded(stage, ["vmap(grad)", "jvp"], ["ordinary", "gradient penalty", "jvp", "used twice"])


@pytest.mark.slow
@pytest.mark.world_size(1, 2)
@STAGES
def test_a_sharded_module_has_every_derivative(stage):
    check_sharded(stage, OVER_INPUTS, LOSSES)


@pytest.mark.parametrize("stage", [0, 3])
def test_kernels_give_way_inside_a_checkpoint_as_well(stage):
    """PyTorch leaves its function modes where a transform meets an autograd.Function."""
    torch.manual_seed(0)
    module, twin = Fused().double(), Composed().double()
    twin.load_state_dict(module.state_dict())
    zerofunc.shard(checkpoint_module(module), stage)
    x, v = torch.randn(2, 2, 3, 6, dtype=torch.float64)

    def loss(model):
        return torch.func.jvp(model, (x,), (v,))[1].square().mean()

    torch.testing.assert_close(loss(module), loss(twin))
    loss(module).backward()
    loss(twin).backward()
    expected = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    found = {name: g for name, g in zerofunc.full_gradients(module).items() if g is not None}
    torch.testing.assert_close(found, expected)


# -- what is kept ------------------------------------------------------------------------------------------------------


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, above those of before."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = 0, 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage):
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.alive += nbytes
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self.forget, key, nbytes)

    def forget(self, key, nbytes):
        self.seen.discard(key)
        self.alive -= nbytes


class Wide(nn.Module):
    """A block of much larger intermediate values than inputs."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        h = self.up(x)
        for _ in range(3):
            h = torch.sin(h)
        return x + self.down(h)


MEMORY = {
    ".backward()": lambda f, x: f(x).sum().backward(),
    "grad": lambda f, x: grad(lambda y: f(y).sum())(x),
    "jvp loss": lambda f, x: jvp(f, (x,), (x,))[1].square().sum().backward(),
    "gradient penalty": lambda f, x: grad(lambda y: f(y).sum())(x).square().sum().backward(),
    "hessian-vector product": lambda f, x: jvp(grad(lambda y: f(y).sum()), (x,), (x,)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_peak_memory_is_that_of_one_block(name):
    x, peaks = torch.randn(256, 8), []
    for call in (None, checkpoint):
        model = nn.Sequential(*(Wide() for _ in range(16)))
        run = (lambda y, m=model: [y := checkpoint(block, y) for block in m][-1]) if call else model
        with PeakBytes() as bytes_alive:
            MEMORY[name](run, x)
        peaks.append(bytes_alive.peak)
    assert peaks[1] < 0.35 * peaks[0]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["ordinary", "gradient penalty", "jvp"])
def test_as_few_pages_are_gathered_as_without(name):
    gathered = []
    for call in (None, checkpoint):
        engine = engine_of(build(lambda call=call: Deep(call)), 3)
        engine.backward(LOSSES[name](engine, data(0, 0)))
        gathered.append(engine.usage().gathered_peak_bytes)
    assert gathered[1] <= gathered[0]


# -- the same again ----------------------------------------------------------------------------------------------------


def seeded(f, *args):
    torch.manual_seed(3)
    result = f(*args)
    return result, torch.rand(2)


DROPPED = {
    "grad": lambda f, x: grad(squares(f))(x),
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "reverse over reverse": OVER_INPUTS["reverse over reverse"],
    "autograd.grad twice": twice_by_autograd,
    "vmap(grad), each sample's own": lambda f, x: vmap(grad(squares(f)), randomness="different")(x),
    "vmap(grad), the same for all": lambda f, x: vmap(grad(squares(f)), randomness="same")(x),
    "vmap over columns": lambda f, x: vmap(grad(squares(f)), in_dims=1, randomness="different")(x.T),
}


@pytest.mark.parametrize("call", [checkpoint, nested])
def test_dropout_is_the_same_in_every_run(call):
    """And the random state afterwards is that of a model without checkpoints."""

    def noisy(call):
        blocks = build(lambda: Deep(call)).train()
        dropped = nn.Sequential(blocks.blocks[0], nn.Dropout(0.5), blocks.blocks[1], nn.Dropout(0.3))
        return lambda x: call(dropped, dropped(x)) if call else dropped(dropped(x))

    x = data(0, 0)[:3]
    for name, derivative in DROPPED.items():
        assert_close(seeded(derivative, noisy(call), x), seeded(derivative, noisy(None), x), name)


def test_autocast_is_that_of_the_first_run():
    model, x = build(Deep).float(), torch.randn(3, 4)
    found = []
    for call in (None, checkpoint):
        model.call = call
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().sum()
        with torch.autocast("cpu", torch.float16):  # that of the backward does not count
            found.append((loss, torch.autograd.grad(loss, model.blocks[0].up.weight)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_trees_of_tensors_and_other_values():
    class Unknown:
        pass

    unknown, a, b = Unknown(), *(torch.randn(3, requires_grad=True) for _ in range(2))

    def fn(x, pairs, *, flag, index):
        y = x * pairs["b"][0]
        return {"out": (y, 3, None), "index": index + 1, "flag": flag, "same": x, "fixed": y.detach()}

    found = checkpoint(fn, a, {"b": [b, "text"]}, flag=unknown, index=torch.arange(3))
    assert found["flag"] is unknown and found["out"][1:] == (3, None)
    assert torch.equal(found["index"], torch.arange(3) + 1)
    (found["out"][0].sum() + found["same"].sum()).backward()
    assert torch.equal(a.grad, b + 1) and torch.equal(b.grad, a)
    a.grad = b.grad = None
    found = checkpoint(fn, a, {"b": [b, "text"]}, flag=unknown, index=torch.arange(3))
    found["fixed"].sum().backward()
    assert b.grad is None


def test_nothing_happens_where_nothing_is_differentiated():
    block, x = build(Block), data(0, 0)
    with torch.no_grad():
        assert checkpoint(block, x).grad_fn is None
    block.requires_grad_(False)
    assert checkpoint(block, x).grad_fn is None


def test_a_later_change_of_an_input_is_noticed():
    block, x = build(Block), data(0, 0).requires_grad_()
    h = x * 1
    y = checkpoint(block, h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- tensors besides the arguments -------------------------------------------------------------------------------------

W = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64, requires_grad=True)
BLOCK = build(Block)


def of_global(x):
    return BLOCK(x * W)


def of_globals_deep_inside(x):
    return (lambda y: of_global(y))(x)


def captures(w, block):
    """Functions of x that read ``w`` and ``block`` in other ways, all of the same value."""
    holder, table = [w], {"w": w}

    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.w = block, w

        def method(self, x):
            return self.block(x * self.w)

    owner = Owner()
    return {
        "closure": lambda x: block(x * w),
        "list and dict": lambda x: block(x * (holder[0] + table["w"]) / 2),
        "inner function": lambda x: (lambda: block(x * w))(),
        "method": owner.method,
        "class's function": functools.partial(Owner.method, owner),
        "partial": functools.partial(lambda scale, net, x: net(x * scale), w, block),
        "keyword of a partial": functools.partial(lambda x, scale, net: net(x * scale), scale=w, net=block),
        "default": lambda x, net=block: net(x * w),
        "global": of_global,
        "global of another function": of_globals_deep_inside,
    }


@pytest.mark.parametrize("name", captures(W, BLOCK))
def test_what_a_function_closes_over_has_its_gradient(name):
    fn, x = captures(W, BLOCK)[name], data(0, 0)
    kept = functools.partial(checkpoint, fn)
    for derivative in (OVER_INPUTS["value"], OVER_INPUTS["jvp"]):
        loss = lambda f: pytree.tree_leaves(derivative(f, x))[-1].square().sum()  # noqa: B023, E731
        over = (W, BLOCK.up.weight)
        assert_close(torch.autograd.grad(loss(kept), over), torch.autograd.grad(loss(fn), over))


def force(x):
    return grad(lambda y: BLOCK(y * W).sum())(x)


def force_by_autograd(x):
    energy = BLOCK(x.requires_grad_() * W).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("fn", [force, force_by_autograd])
def test_a_function_may_take_derivatives_itself(fn):
    over, x = (BLOCK.up.weight, W), data(0, 0).requires_grad_()
    found = [torch.autograd.grad(f(x * 1).square().sum(), over) for f in (fn, functools.partial(checkpoint, fn))]
    assert_close(*found)


def test_what_a_function_closes_over_may_be_transformed():
    x, w = data(0, 0), data(1, 0)
    found = {}
    for call in (lambda fn, y: fn(y), checkpoint):
        f = lambda v: call(lambda y: BLOCK(y * v), x[0]).square().sum()  # noqa: B023, E731
        found[call] = [grad(f)(w[0]), hessian(f)(w[0]), vmap(grad(f))(w), jvp(grad(f), (w[0],), (w[1],))]
    plain, kept = found.values()
    assert_close(kept, plain)


class Holder:
    """Where nobody looks for tensors."""


def test_what_is_not_found_is_refused():
    holder, x = Holder(), data(0, 0)

    def fn(y):
        return (y * holder.w).sum()

    holder.w = W
    with pytest.raises(RuntimeError, match=r"shape \(4,\) that requires grad.*Pass it as an argument"):
        checkpoint(fn, x.clone().requires_grad_())

    def loss(w):
        holder.w = w
        return checkpoint(fn, w * 2)

    for transform in (grad, hessian, lambda f: vmap(grad(f))):
        with pytest.raises(RuntimeError, match="belongs to a transform.*Pass it as an argument"):
            transform(loss)(x)
    with pytest.raises(RuntimeError, match="has a tangent"):
        by_forward_ad(loss, x.clone().requires_grad_())
    assert_close(jacfwd(loss)(x), 4 * x)  # where reverse mode keeps nothing, it is fn itself
    with pytest.raises(ValueError, match="context_fn: expected None"):
        checkpoint(fn, x, context_fn=lambda: None)
    holder.w = W.detach()
    assert checkpoint(fn, x.clone().requires_grad_()).requires_grad


# -- modules -----------------------------------------------------------------------------------------------------------


def test_a_module_checkpoints_its_forward():
    plain, model, x = build(Block), checkpoint_module(build(Block)), data(0, 0)
    assert checkpoint_module(model) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    others = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in others:
        assert type(other(x).grad_fn).__name__ == "_CheckpointBackward"
        assert_close(gradients_of(other, LOSSES["jvp"], x), gradients_of(plain, LOSSES["jvp"], x))
    assert model.up.weight.grad is not others[1].up.weight.grad
    for other in others:
        checkpoint_module(other, enabled=False)
        checkpoint_module(other, enabled=False)
        assert type(other(x).grad_fn).__name__ == "AddBackward0" and "forward" not in vars(other)


def test_a_forward_of_the_module_s_own_is_kept():
    model = build(Block)
    forward = model.forward = lambda x: x * model.up.weight.sum()
    assert_close(checkpoint_module(model)(data(0, 0)), forward(data(0, 0)))
    assert checkpoint_module(model, enabled=False).forward is forward


def language_model(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "attn_implementation": "eager"}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=8, n_embd=8, n_layer=2, n_head=2, **sizes)
        return transformers.GPT2LMHeadModel(config)
    layers = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**layers, **sizes))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_of_transformers_checkpoints_its_layers(kind):
    torch.manual_seed(0)
    plain = language_model(kind).double().train()
    model = checkpoint_module(copy.deepcopy(plain))
    assert model.is_gradient_checkpointing
    tokens = torch.randint(11, (2, 6))

    def loss(f, x):
        torch.manual_seed(1)  # GPT-2 has dropout
        return f(inputs_embeds=x, labels=tokens).loss

    x = torch.randn(2, 6, 8, dtype=torch.float64)
    for f in (model, plain):
        f.zero_grad()
        loss(f, x).backward()
    assert_close(*[{n: p.grad for n, p in f.named_parameters()} for f in (model, plain)])
    assert_close(*[grad(lambda y, f=f: loss(f, y))(x) for f in (model, plain)])
    assert_close(*[grad(lambda z, f=f: grad(lambda y: loss(f, y))(z).square().sum())(x) for f in (model, plain)])
    assert not checkpoint_module(model, enabled=False).is_gradient_checkpointing


@pytest.mark.world_size(1)
@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_s_own_checkpoint_works_at_stage_3(reentrant):
    own = functools.partial(torch_checkpoint.checkpoint, use_reentrant=reentrant)
    engine, plain = engine_of(build(lambda: Deep(own)), 3), build(Deep)
    x = data(0, 0).requires_grad_()
    for loss in [LOSSES["ordinary"]] if reentrant else [LOSSES["ordinary"], LOSSES["gradient penalty by autograd"]]:
        engine.backward(loss(engine, x))
        assert_close(zerofunc.full_gradients(engine.module), gradients_of(plain, loss, x))
        engine.zero_grad()
