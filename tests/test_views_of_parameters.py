"""Views, casts and addresses of parameters: each begins where its storage does, and autograd keeps no gathered one."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import STAGES, assert_same_gradients, build, data
from zerofunc.pages.paged_tensor import PagedTensor


class Uneven(nn.Module):
    """Three parameters of one page: an odd number of elements, none, and a matrix read by way of its storage."""

    def __init__(self):
        super().__init__()
        self.first, self.nothing = nn.Parameter(torch.randn(5)), nn.Parameter(torch.empty(0))
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        band = self.matrix.as_strided((3, 2), (4, 1), 2)
        diagonal = self.matrix[1:].as_strided((3,), (5,))
        number = torch.view_as_complex(self.matrix.view(8, 2)).prod().abs()
        return (x @ self.matrix[:, 1:] @ band).sum(-1) * number * self.first.sum() + diagonal.square().sum()


def loss_of(model, step, rank):
    return model(data(step, rank)).square().mean()


@STAGES
@pytest.mark.world_size(2)
def test_strides_offsets_and_complex_views_are_those_of_the_parameter(stage):
    module, model = zerofunc.shard(build(Uneven), stage), build(Uneven)
    loss = loss_of(module, 0, dist.get_rank())
    torch.testing.assert_close(loss, loss_of(model, 0, dist.get_rank()))
    loss.backward()
    torch.stack([loss_of(model, 0, rank) for rank in range(2)]).mean().backward()
    model.nothing.grad = None
    assert_same_gradients(module, model)


@STAGES
@pytest.mark.world_size(2)
def test_a_gathered_storage_holds_the_parameter_and_nothing_else(stage):
    module, model = zerofunc.shard(build(Uneven), stage), build(Uneven)
    with zerofunc.gathered(module):
        for parameter, plain in zip(module.parameters(), model.parameters(), strict=True):
            found = torch.empty(0, dtype=parameter.dtype).set_(
                parameter.untyped_storage(), parameter.storage_offset(), parameter.shape, parameter.stride()
            )
            torch.testing.assert_close(found, plain.detach())
            assert parameter.untyped_storage().nbytes() == plain.untyped_storage().nbytes()


@STAGES
@pytest.mark.world_size(2)
def test_an_empty_parameter_leaves_its_neighbour_alone_in_pickles(stage):
    module, model = zerofunc.shard(build(Uneven), stage), build(Uneven)
    entries = module.state_dict()
    assert entries["nothing"].untyped_storage().nbytes() == 0
    torch.testing.assert_close(dict(pickle.loads(pickle.dumps(dict(entries)))), dict(model.state_dict()))


VIEWS = {
    "t_": lambda w: w.t_(),
    "transpose_": lambda w: w.transpose_(0, 1),
    "swapdims_": lambda w: w.swapdims_(0, 1),
    "unsqueeze_": lambda w: w.unsqueeze_(1),
    "squeeze_": lambda w: w.unsqueeze_(0).squeeze_(0).t_(),
    "as_strided_": lambda w: w.as_strided_((3, 2), (4, 1), 2),
    "of a view": lambda w: w[1:, :3].t_().unsqueeze_(-1),
}


@pytest.mark.parametrize("change", VIEWS)
@STAGES
@pytest.mark.world_size(2)
def test_a_detached_parameter_becomes_another_view_in_place(stage, change):
    module, model = zerofunc.shard(build(Uneven), stage, resident_bytes=0), build(Uneven)
    found, expected = module.matrix.detach(), model.matrix.detach()
    before = module.matrix.detach()
    found, expected = VIEWS[change](found), VIEWS[change](expected)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    torch.testing.assert_close(found.clone(), expected)
    torch.testing.assert_close(found.sum(0), expected.sum(0))
    found.mul_(2)
    expected.mul_(2)
    torch.testing.assert_close(before.clone(), model.matrix.detach())


@pytest.mark.world_size(2)
def test_the_shape_and_the_storage_of_a_sharded_parameter_are_fixed():
    module = zerofunc.shard(build(Uneven), 3)
    with torch.no_grad(), pytest.raises(RuntimeError, match="t_ on parameter 'matrix': the shape"):
        module.matrix.t_()
    for change in (lambda w: w.resize_(2, 2), lambda w: w.resize_(8, 8), lambda w: w.set_(torch.zeros(4, 4).double())):
        with pytest.raises(RuntimeError, match="on parameter 'matrix': a sharded parameter's storage is fixed"):
            change(module.matrix.detach())
    assert module.matrix.shape == (4, 4)


# -- what autograd keeps ----------------------------------------------------------------------------------------------


def kept(output):
    """All tensors that the graph of an output has saved."""
    todo, seen, found = [output.grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [t for n in dir(node) if n.startswith("_saved_") and isinstance(t := getattr(node, n), torch.Tensor)]
        todo += [following for following, _ in node.next_functions]
    return found


def wide():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


PRECISIONS = {
    "float32": ({}, None),
    "bfloat16": ({"bf16": {"enabled": True}}, None),
    "float16": ({"fp16": {"enabled": True}}, None),
    "autocast by the config": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, None),
    "autocast around the forward": ({}, torch.bfloat16),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.world_size(2)
def test_autograd_keeps_sharded_weights_and_no_gathered_ones(precision):
    more, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
              "zerofunc": {"page_bytes": 4, "resident_bytes": 0}}  # fmt: skip
    engine = zerofunc.initialize(wide(), {**config, **more})[0]
    dtype = next(engine.module.parameters()).dtype
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        output = engine(torch.randn(3, 4, dtype=dtype))
    tensors = kept(output)
    matrices = [t for t in tensors if t.dim() == 2 and t.numel() in (32, 64) and 3 not in t.shape]
    assert len(matrices) >= 2
    assert all(isinstance(t, PagedTensor) for t in matrices)
    assert zerofunc.usage(engine.module).gathered_bytes <= 4 * 64
    engine.backward(output.float().sum())
    engine.step()


@STAGES
@pytest.mark.world_size(2)
def test_training_under_autocast_is_that_of_one_process(stage):
    torch.manual_seed(0)
    module = zerofunc.shard(wide(), stage, page_bytes=4, resident_bytes=0)
    torch.manual_seed(0)
    model = wide()
    optimizers = torch.optim.SGD(zerofunc.shards(module).values(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for net, optimizer, ranks in zip((module, model), optimizers, ([dist.get_rank()], [0, 1]), strict=True):
            losses = []
            for rank in ranks:
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(net(data(step, rank).float()).float().square().mean())
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = {name: p.detach().clone() for name, p in module.named_parameters()}
    torch.testing.assert_close(found, {n: p.detach() for n, p in model.named_parameters()}, rtol=1e-2, atol=1e-3)


@pytest.mark.world_size(2)
def test_a_cast_of_an_older_weight_is_refused_under_autocast():
    module = zerofunc.shard(build(Uneven), 3)
    with torch.autocast("cpu", torch.bfloat16):
        cast = module.matrix.to(torch.bfloat16)
    with torch.no_grad():
        module.matrix.mul_(2)
    with pytest.raises(RuntimeError, match=r"'matrix' was used.*keep a value with \.clone\(\)"):
        cast.sum()
