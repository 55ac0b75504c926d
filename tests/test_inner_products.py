"""Inner products of several gradients over all ranks, for methods that weigh the gradients of several losses."""

import pytest
import torch
import torch.distributed as dist

import zerofunc
from reference import STAGES, Net, build, data

SIZES = dict(page_bytes=160, resident_bytes=0)


def losses(output, x):
    """Three losses of one output, which pull in different directions."""
    return torch.stack([(output - x[:, :3].sin()).square().mean(), (output + 1).square().mean(), output.exp().mean()])


def jacobian_in_one_process(num_ranks):
    """The mean Jacobian over all ranks' data, {name: [3, *shape]}, and the module."""
    net = build(Net)
    parameters = dict(net.named_parameters())

    def of_rank(rank):
        x = data(0, rank)
        return torch.func.jacrev(lambda p: losses(torch.func.functional_call(net, p, (x,)), x))(parameters)

    found = [of_rank(rank) for rank in range(num_ranks)]
    return net, {name: torch.stack([one[name] for one in found]).mean(0).detach() for name in parameters}


def jacobian_over_shards(module, rank):
    x = data(0, rank)
    return torch.func.jacrev(lambda s: losses(zerofunc.functional_call(module, s, (x,)), x))(zerofunc.shards(module))


@STAGES
@pytest.mark.world_size(1, 2, 3)
def test_the_gramian_of_several_losses_is_that_of_one_process(stage, world_size):
    module = zerofunc.shard(build(Net), stage, **SIZES)
    net, whole = jacobian_in_one_process(world_size)
    flat = torch.cat([rows.flatten(1) for rows in whole.values()], 1)
    jacobian = jacobian_over_shards(module, dist.get_rank())
    moved = zerofunc.usage(module).moved_bytes
    found = zerofunc.gramian(jacobian, module)
    assert world_size == 1 or stage == 0 or zerofunc.usage(module).moved_bytes - moved <= 2 * 9 * 8, "one exchange"
    torch.testing.assert_close(found, flat @ flat.T)
    trees = [{name: rows[i] for name, rows in jacobian.items()} for i in range(3)]
    torch.testing.assert_close(zerofunc.gramian(trees), found)
    torch.testing.assert_close(zerofunc.vdot(trees[0], trees[2], module), found[0, 2])


@pytest.mark.world_size(2)
def test_the_gramian_is_differentiable():
    module = zerofunc.shard(build(Net), 3, **SIZES)
    trees = [zerofunc.draw(module, seed) for seed in (1, 2)]
    full = [zerofunc.unshard(module, tree) for tree in trees]
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)

    def of_parts(trees):
        return (weights * zerofunc.gramian(trees, module)).sum().square()

    def of_whole(trees):
        rows = torch.stack([torch.cat([part.flatten() for part in tree.values()]) for tree in trees])
        return (weights * (rows @ rows.T)).sum().square()

    gradient = torch.func.grad(of_parts)(trees)
    product = torch.func.jvp(torch.func.grad(of_parts), (trees,), (trees,))[1]
    for expected, found in (
        (torch.func.grad(of_whole)(full), gradient),
        (torch.func.jvp(torch.func.grad(of_whole), (full,), (full,))[1], product),
    ):
        for tree, parts in zip(expected, found, strict=True):
            torch.testing.assert_close(zerofunc.unshard(module, parts), tree)


@pytest.mark.world_size(1)
def test_trees_that_make_no_gramian_are_refused():
    module = zerofunc.shard(build(Net), 3, **SIZES)
    shards = {name: shard.detach() for name, shard in zerofunc.shards(module).items()}
    with pytest.raises(ValueError, match="expected the same number, at least 1"):
        zerofunc.gramian([], module)
    with pytest.raises(ValueError, match=r"expected \[m, n\], or a list of trees"):
        zerofunc.gramian(shards, module)
    with pytest.raises(ValueError, match=r"differ in names: \['head\.bias'\]"):
        zerofunc.gramian([shards, {name: shards[name] for name in shards if name != "head.bias"}], module)
    with pytest.raises(ValueError, match="0 sharded modules have such shards; say which one: gramian"):
        zerofunc.gramian([{"nothing": torch.zeros(1)}])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["UPGrad", "MGDA", "IMTLG", "PCGrad"])
@pytest.mark.world_size(2)
def test_torchjd_weighs_tasks_over_shards_as_in_one_process(method):
    from torchjd import aggregation

    module = zerofunc.shard(build(Net), 3, **SIZES)
    net, whole = jacobian_in_one_process(2)
    torch.manual_seed(0)  # PCGrad takes the tasks in a random order
    expected = getattr(aggregation, method)()(torch.cat([rows.flatten(1) for rows in whole.values()], 1))
    jacobian = jacobian_over_shards(module, dist.get_rank())
    torch.manual_seed(0)
    weights = getattr(aggregation, f"{method}Weighting")()(zerofunc.gramian(jacobian, module))
    direction = zerofunc.unshard(module, {name: weights @ rows for name, rows in jacobian.items()})
    flat = torch.cat([direction[name].flatten() for name, _ in net.named_parameters()])
    torch.testing.assert_close(flat, expected)
