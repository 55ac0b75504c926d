"""Ranks whose programs differ are told so, all of them and soon, with what each was about to do."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import STAGES, Net, build, data, engine_of, fit

_timeouts = (20 + number / 1000 for number in itertools.count())  # groups of their own for each test


def layers():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def paged(**more):
    """Stage 3, nothing resident."""
    return zerofunc.shard(build(layers), 3, page_bytes=1, resident_bytes=0, **{"timeout_s": next(_timeouts), **more})


def assert_told(program, *words):
    began = time.monotonic()
    with pytest.raises(zerofunc.DivergenceError) as caught:
        program()
    assert time.monotonic() - began < 10  # and not after the time-out
    for word in words:
        assert word in str(caught.value)


def is_first():
    return dist.get_rank() == 0


@pytest.mark.world_size(2)
def test_a_forward_inside_the_backward_of_one_rank():
    net = paged()
    h = net[0](data(0, 0))
    if is_first():
        h.register_hook(lambda gradient: [gradient, net(data(0, 0))][0])
    loss = net[1:](h).square().sum()
    assert_told(loss.backward, "rank 0: gather of page", "rank 1: end of a backward of module")


@pytest.mark.world_size(2)
def test_one_rank_alone_wants_the_gradient_of_its_input():
    net = paged()
    loss = net(data(0, 0).requires_grad_(is_first())).square().sum()
    assert_told(loss.backward, "rank 0: gather of page", "(0.weight)", "rank 1: end of a backward of module")


@pytest.mark.world_size(2)
def test_a_norm_beside_a_backward():
    net = paged()
    loss = net(data(0, 0)).square().sum()
    if is_first():
        assert_told(lambda: zerofunc.clip_grad_norm_(net, 1.0), "rank 0: norm of the gradient", "rank 1: gather of")
    else:
        assert_told(loss.backward, "rank 0: norm of the gradient", "rank 1: gather of page")


@pytest.mark.world_size(2)
@STAGES
def test_the_end_of_a_backward_beside_a_norm(stage):
    net = zerofunc.shard(build(Net), stage, page_bytes=160, timeout_s=next(_timeouts))
    loss = fit(net, 0, 0)
    program = loss.backward if is_first() else lambda: zerofunc.clip_grad_norm_(net, 1.0)
    assert_told(program, "rank 0: ", "rank 1: norm of the gradient")


@pytest.mark.world_size(2)
@STAGES
def test_a_module_that_the_loss_of_one_rank_alone_reaches(stage):
    first, second = (zerofunc.shard(build(Net), stage, page_bytes=160, timeout_s=21 + stage / 8) for _ in range(2))

    def program():
        loss = fit(first, 0, 0)
        (loss + fit(second, 0, 0).detach() if is_first() else loss + fit(second, 0, 0)).backward()
        zerofunc.clip_grad_norm_(first, 1.0)

    assert_told(program, "end of a backward of module")


@pytest.mark.world_size(2)
@STAGES
def test_the_step_of_an_optimizer_on_one_rank_alone(stage):
    net = zerofunc.shard(build(Net), stage, page_bytes=160, resident_bytes=0, timeout_s=next(_timeouts))
    optimizer = torch.optim.SGD(zerofunc.shards(net).values(), lr=0.1)
    fit(net, 0, 0).backward()

    def program():
        if is_first():
            optimizer.step()
        fit(net, 1, 0).backward()

    assert_told(program, "rank 0: ", "rank 1: ")


@pytest.mark.world_size(2)
def test_a_backward_that_fails_on_one_rank_alone():
    net = zerofunc.shard(build(Net), 2, page_bytes=160, timeout_s=next(_timeouts))

    def fail(gradient):
        raise ArithmeticError

    h = net.encode(data(0, 0))
    if is_first():
        h.register_hook(fail)  # after the head has reported
        with pytest.raises(ArithmeticError):
            net.head(h).sum().backward()
        h = net.encode(data(0, 0))
    assert_told(lambda: [net.head(h).sum().backward(), zerofunc.clip_grad_norm_(net, 1.0)], "module")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("before", ["head", "nothing"])
@STAGES
def test_a_backward_that_fails_on_all_ranks_leaves_nothing(stage, before):
    engine, plain = engine_of(build(Net), stage), build(Net)
    for step in range(2):
        h = engine.module.encode(data(step, 0))
        h.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            # At stage 3 ranks read the same pages.
            engine.backward((engine.module.head(h) if before == "head" or is_first() or stage == 3 else h).sum())
        engine.backward(fit(engine, step, 0))
        fit(plain, step, 0).backward()
        gradients = zerofunc.full_gradients(engine.module)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-11)
        engine.zero_grad()
        plain.zero_grad()


@pytest.mark.slow  # it waits for seconds
@pytest.mark.world_size(2)
def test_a_rank_that_is_elsewhere_is_named():
    net = paged(timeout_s=1.7)
    if is_first():
        with pytest.raises(zerofunc.DivergenceError, match=r"within 1\.7 s.*rank 1: not waiting, or ended"):
            net(data(0, 0))


@pytest.mark.world_size(2)
def test_a_rank_that_waits_in_vain_hears_of_the_others():
    first, second = paged(timeout_s=1.5), paged(timeout_s=1.6)
    with pytest.raises(zerofunc.DivergenceError) as caught:
        (first if is_first() else second)(data(0, 0))
    assert f"rank {1 - dist.get_rank()}: gather of page" in str(caught.value)
