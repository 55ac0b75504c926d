"""Tests of the optimizers: what a name means, which are refused, and that pieces step like the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerofunc import optimizers
from zerofunc.optimizers import NOT_ELEMENTWISE, build_optimizer, refuse_not_elementwise

ELEMENTWISE = ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop"]


def leaves(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def take_steps(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], gradient: torch.Tensor) -> None:
    for scale in (1.0, -0.5, 0.25):
        for param, part in zip(params, gradient.split([len(p) for p in params]), strict=True):
            param.grad = scale * part
        optimizer.step()


@pytest.mark.parametrize("type_name", ELEMENTWISE)
def test_pieces_step_like_the_whole_even_when_one_is_empty(type_name: str) -> None:
    (whole,) = leaves(7)
    pieces = [piece.clone().detach().requires_grad_() for piece in whole.detach().split([4, 0, 3])]
    gradient = torch.linspace(-1, 1, 7)
    take_steps(build_optimizer([whole], type_name, {"lr": 0.1}), [whole], gradient)
    take_steps(build_optimizer(pieces, type_name, {"lr": 0.1}), pieces, gradient)
    torch.testing.assert_close(torch.cat(pieces), whole)


@pytest.mark.parametrize("type_name", ELEMENTWISE)
def test_a_rank_may_own_nothing_but_empty_shards(type_name: str) -> None:
    params = leaves(0, 0)
    optimizer = build_optimizer(params, type_name, {})
    take_steps(optimizer, params, torch.empty(0))
    assert all(len(param) == 0 for param in params)


@pytest.mark.parametrize("type_name", ["Adam", "adam", "ADAMW", "AdamW"])
def test_adam_means_adamw_without_weight_decay_by_default(type_name: str) -> None:
    optimizer = build_optimizer(leaves(3), type_name, {"lr": 1e-2, "betas": [0.8, 0.9]})
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["weight_decay"] == 0.0 and optimizer.defaults["betas"] == (0.8, 0.9)


def test_adam_w_mode_false_means_adam_but_not_for_adamw() -> None:
    assert type(build_optimizer(leaves(3), "Adam", {"adam_w_mode": False})) is torch.optim.Adam
    assert type(build_optimizer(leaves(3), "AdamW", {"adam_w_mode": False})) is torch.optim.AdamW


def test_torch_adam_keeps_the_default_of_torch() -> None:
    optimizer = build_optimizer(leaves(3), "AdamW", {"torch_adam": True})
    assert optimizer.defaults["weight_decay"] == torch.optim.AdamW(leaves(3)).defaults["weight_decay"] > 0
    assert (
        build_optimizer(leaves(3), "AdamW", {"torch_adam": True, "weight_decay": 0.3}).defaults["weight_decay"] == 0.3
    )


def test_keys_that_upstream_takes_for_adam_are_understood() -> None:
    build_optimizer(leaves(3), "Adam", {"bias_correction": True, "fp32_optimizer_states": True, "amsgrad": True})
    with pytest.raises(ValueError, match="bias_correction: false is not supported"):
        build_optimizer(leaves(3), "Adam", {"bias_correction": False})
    with pytest.raises(ValueError, match="fp32_optimizer_states: false is not supported"):
        build_optimizer(leaves(3), "Adam", {"fp32_optimizer_states": False})
    with pytest.raises(ValueError, match="SGD does not take torch_adam; it takes lr, momentum"):
        build_optimizer(leaves(3), "SGD", {"torch_adam": False})


@pytest.mark.parametrize("type_name", ["Adam", "SGD"])
def test_max_grad_norm_points_to_gradient_clipping(type_name: str) -> None:
    with pytest.raises(ValueError, match="max_grad_norm: .* set gradient_clipping instead"):
        build_optimizer(leaves(3), type_name, {"max_grad_norm": 1.0})


def test_bad_parameters_are_named_with_those_accepted() -> None:
    with pytest.raises(ValueError, match="optimizer.params: AdamW does not take leaning_rate; it takes lr, betas, eps"):
        build_optimizer(leaves(3), "Adam", {"leaning_rate": 0.1})
    with pytest.raises(ValueError, match="AdamW refused .*Invalid learning rate"):
        build_optimizer(leaves(3), "AdamW", {"lr": -1.0})


def test_the_parameters_of_the_user_are_not_changed() -> None:
    params = {"adam_w_mode": True, "betas": [0.9, 0.99]}
    groups: list[dict[str, Any]] = [{"params": leaves(3), "lr": 0.5}]
    optimizer = build_optimizer(groups, "Adam", params)
    assert params == {"adam_w_mode": True, "betas": [0.9, 0.99]}
    assert set(groups[0]) == {"params", "lr"}
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(ValueError, match="found 'AdmaW'; did you mean AdamW"):
        build_optimizer(leaves(3), "AdmaW", {})
    with pytest.raises(ValueError, match="found 'Optimizer'"):
        build_optimizer(leaves(3), "Optimizer", {})


# Fused kernels


@pytest.mark.parametrize("type_name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_a_fused_kernel_is_used_where_torch_has_one(type_name: str) -> None:
    assert build_optimizer(leaves(3, 0), type_name, {"lr": 0.1}).defaults["fused"] is True
    assert build_optimizer(iter(leaves(3)), type_name, {"lr": 0.1}).defaults["fused"] is True
    assert build_optimizer([("name", leaves(3)[0])], type_name, {"lr": 0.1}).defaults["fused"] is True
    assert build_optimizer([{"params": iter(leaves(3, 0))}], type_name, {"lr": 0.1}).defaults["fused"] is True


@pytest.mark.parametrize("choice", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_a_choice_of_kernel_is_respected(choice: dict[str, bool]) -> None:
    assert not build_optimizer(leaves(3), "AdamW", choice).defaults["fused"]
    assert not build_optimizer([{"params": leaves(3), **choice}], "AdamW", {}).defaults["fused"]


@pytest.mark.parametrize("type_name", ["AdamW", "SGD", "Adagrad"])
def test_a_fused_step_agrees_with_the_plain_one(type_name: str) -> None:
    fused, plain = leaves(5, 0), leaves(5, 0)
    gradient = torch.linspace(-1, 1, 5)
    take_steps(build_optimizer(fused, type_name, {"lr": 0.1, "weight_decay": 0.1}), fused, gradient)
    take_steps(build_optimizer(plain, type_name, {"lr": 0.1, "weight_decay": 0.1, "fused": False}), plain, gradient)
    torch.testing.assert_close(fused, plain)


def test_no_fused_kernel_is_used_where_its_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_optimizer([torch.zeros(3, device="meta")], "AdamW", {}).defaults["fused"] is None
    assert build_optimizer(leaves(3), "RMSprop", {}).defaults.get("fused") is None
    monkeypatch.setattr(optimizers, "_fused_steps", lambda name, device, dtype: dtype is torch.float64)
    mixed = [torch.zeros(3), torch.zeros(3, dtype=torch.float64)]
    assert build_optimizer(mixed, "AdamW", {}).defaults["fused"] is None
    assert build_optimizer(mixed[1:], "AdamW", {}).defaults["fused"] is True


def test_the_probe_takes_a_failing_step_for_no(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # noqa: ANN401
            raise RuntimeError("no kernel")

    monkeypatch.setitem(optimizers._OPTIMIZERS, "failing", Failing)
    assert not optimizers._fused_steps("Failing", torch.device("cpu"), torch.float32)


# Not elementwise


@pytest.mark.parametrize("type_name", ["LBFGS", "Muon", "muon", "Adafactor", "SparseAdam", "Lamb"])
def test_an_optimizer_that_is_not_elementwise_is_refused_with_the_reason(type_name: str) -> None:
    with pytest.raises(ValueError, match=r"is not elementwise \(it.*shards are 1-D pieces"):
        build_optimizer(leaves(3), type_name, {})


def test_the_names_of_torch_are_all_either_elementwise_or_not() -> None:
    names = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert names <= {*ELEMENTWISE, *NOT_ELEMENTWISE, "Optimizer"}, "decide about the new one"


def test_an_instance_is_refused_by_its_class_and_its_bases() -> None:
    class MyLBFGS(torch.optim.LBFGS):
        pass

    class Lamb(torch.optim.SGD):
        pass

    refuse_not_elementwise(torch.optim.AdamW(leaves(3)))
    for optimizer in (MyLBFGS(leaves(3)), Lamb(leaves(3))):
        with pytest.raises(ValueError, match="is not elementwise"):
            refuse_not_elementwise(optimizer)
