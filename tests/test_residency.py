"""Stage 3 within tight budgets: what stays resident counts, and the page being read is never evicted."""

import contextlib
import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import assert_same_gradients, build, data, mean_over_ranks

LAYER_BYTES, BIAS_BYTES = 8 * 8 * 8, 8 * 8


def make():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def loss(model, step, rank):
    return model(data(step, rank, 2, 8)).square().sum()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("held", ["persistent", "pinned"])
def test_a_page_gathered_ahead_leaves_room_for_what_stays(held):
    budget = 2 * LAYER_BYTES + BIAS_BYTES  # two weights alone, or one beside four biases
    persistence = BIAS_BYTES if held == "persistent" else 0
    net, plain = build(make), build(make)
    zerofunc.shard(net, 3, page_bytes=4, resident_bytes=budget, persistence_bytes=persistence, timeout_s=8)
    for step in range(5):
        pinned = [layer.bias for layer in net] if held == "pinned" else []
        with zerofunc.gathered(pinned) if pinned else contextlib.nullcontext():
            loss(net, step, dist.get_rank()).backward()
        mean_over_ranks(loss, plain, step).backward()
        assert_same_gradients(net, plain)
    assert zerofunc.usage(net).gathered_peak_bytes <= budget + LAYER_BYTES  # an operator still reads the one before
    torch.testing.assert_close(net[0].weight.detach().clone(), plain[0].weight.detach())


def pages_of(net):
    return net.__dict__["_zerofunc"].pages, net.__dict__["_zerofunc"].pager


@pytest.mark.world_size(2)
def test_the_page_that_was_read_longest_ago_is_evicted():
    net = build(make)
    zerofunc.shard(net, 3, page_bytes=4, resident_bytes=2 * LAYER_BYTES, prefetch=False, timeout_s=8)
    (pages, pager), gathers = pages_of(net), []
    first, second, third = pages[0], pages[2], pages[4]
    for page in (first, second, first, third, first, second):
        before = zerofunc.usage(net).moved_bytes
        pager.read(page)
        gathers.append(zerofunc.usage(net).moved_bytes > before)
    assert gathers == [True, True, False, True, False, True]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("is_ahead", [True, False])
def test_pages_are_gathered_ahead_when_they_followed_twice_and_are_never_evicted_for_nothing(is_ahead):
    net = build(make)
    zerofunc.shard(net, 3, page_bytes=4, resident_bytes=2 * LAYER_BYTES, prefetch=is_ahead, timeout_s=8)
    (pages, pager), resident = pages_of(net), []
    layers = [pages[0], pages[2], pages[4]]
    for _ in range(4):
        for number, page in enumerate(layers):
            pager.read(page)
            resident.append(pager.is_resident(layers[(number + 1) % 3]))
    assert resident == [False] * 7 + [is_ahead] * 5


@pytest.mark.world_size(2)
def test_a_model_may_go_while_a_page_of_it_is_on_its_way():
    for late in (0, 1):
        net = build(make)
        zerofunc.shard(net, 3, page_bytes=4, resident_bytes=1 << 20, timeout_s=8)
        pages, pager = pages_of(net)
        if dist.get_rank() == late:
            time.sleep(0.2)  # the other rank gives the memory up before this one sends
        pager._gather(pages[0])
        del net, pages, pager
        gc.collect()
        other, plain = build(make), build(make)
        zerofunc.shard(other, 3, page_bytes=4, timeout_s=8)
        loss(other, 0, dist.get_rank()).backward()
        mean_over_ranks(loss, plain, 0).backward()
        assert_same_gradients(other, plain)


@pytest.mark.world_size(2)
def test_released_pages_leave_no_memory_behind():
    net = build(make)
    zerofunc.shard(net, 3, page_bytes=4, resident_bytes=1 << 20, timeout_s=8)
    net(torch.zeros(2, 8, dtype=torch.float64))
    (pages, pager), held = pages_of(net), zerofunc.usage(net).buffer_bytes
    assert held >= 4 * LAYER_BYTES and pager.is_resident(pages[0])
    pager.release()
    assert zerofunc.usage(net).buffer_bytes == 0 and not pager.is_resident(pages[0])
    net(torch.zeros(2, 8, dtype=torch.float64))
    assert zerofunc.usage(net).buffer_bytes == held


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_of_the_values_that_are_there_keeps_the_digits_of_masters(stage):
    net = nn.Linear(8, 8)
    zerofunc.shard(net, stage, param_dtype=torch.bfloat16, timeout_s=8)
    masters = {name: part.detach().clone() for name, part in zerofunc.shards(net).items()}
    assert any(not torch.equal(part, part.bfloat16().float()) for part in masters.values() if len(part))
    with torch.no_grad():
        net.weight.copy_(net.weight.detach().clone())
        net.weight[0, 0] = 3.0
    zerofunc.refresh(net)
    changed = [
        int((part.detach() != masters[name]).sum()) for name, part in zerofunc.shards(net).items() if name == "weight"
    ]
    assert changed == [1 if dist.get_rank() == 0 else 0]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_on_a_mesh_of_two_axes_the_writer_is_that_rank_of_the_mesh(stage):
    mesh = dist.init_device_mesh("cpu", (2, 2)) if hasattr(dist, "init_device_mesh") else None
    net = build(make)
    zerofunc.shard(net, stage, mesh, page_bytes=4, timeout_s=8)
    for writer in range(4):
        with zerofunc.gathered(net, write=True, writer=writer), torch.no_grad():
            net[0].weight.fill_(float(dist.get_rank()))
        assert net[0].weight.detach().unique().tolist() == [float(writer)]
