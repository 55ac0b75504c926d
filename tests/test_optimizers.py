"""Tests of the optimizers: what a name means, what an update depends on, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zerofunc.optimizers import Lion, MuonWithAdamW, build_optimizer, muon_optimizer, named, refuse_known, scope_of

ELEMENTWISE = [
    "Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop", "Lion"
]  # fmt: skip


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
    monkeypatch.setattr(named, "_fused_steps", lambda name, device, dtype: dtype is torch.float64)
    mixed = [torch.zeros(3), torch.zeros(3, dtype=torch.float64)]
    assert build_optimizer(mixed, "AdamW", {}).defaults["fused"] is None
    assert build_optimizer(mixed[1:], "AdamW", {}).defaults["fused"] is True


def test_the_probe_takes_a_failing_step_for_no(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # noqa: ANN401
            raise RuntimeError("no kernel")

    monkeypatch.setitem(named._OPTIMIZERS, "failing", Failing)
    assert not named._fused_steps("Failing", torch.device("cpu"), torch.float32)


# Lion


def test_lion_follows_its_formula() -> None:
    (param,) = leaves(5)
    expected, moment = param.detach().clone(), torch.zeros(5)
    optimizer = Lion([param, *leaves(2)], lr=0.1, betas=(0.8, 0.6), weight_decay=0.5)
    for gradient in torch.randn(4, 5, generator=torch.Generator().manual_seed(1)):
        param.grad = gradient
        optimizer.step()
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * (0.8 * moment + 0.2 * gradient).sign()
        moment = 0.6 * moment + 0.4 * gradient
        torch.testing.assert_close(param.detach(), expected)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], moment)
    assert len(optimizer.state) == 1, "a parameter without a gradient has no state"


def test_lion_is_built_by_name_with_the_defaults_of_deepspeed() -> None:
    optimizer = build_optimizer(leaves(3), "lion", {"betas": [0.9, 0.99]})
    assert optimizer.defaults == {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}
    assert Lion(leaves(3)).defaults["betas"] == (0.9, 0.999)
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=f"Lion refused .*{next(iter(wrong))} is"):
            build_optimizer(leaves(3), "Lion", wrong)


# Muon


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.embed_out = nn.Embedding(7, 4), nn.Linear(4, 4, bias=False)
        self.mix, self.conv, self.lm_head = nn.Linear(4, 6), nn.Conv1d(2, 2, 3), nn.Linear(6, 7)


def names_in(module: nn.Module, group: dict[str, Any]) -> set[str]:
    wanted = {id(param) for param in group["params"]}
    return {name for name, param in module.named_parameters() if id(param) in wanted}


def test_muon_takes_hidden_matrices_and_what_is_marked() -> None:
    module = Block()
    setattr(module.embed_out.weight, "use_muon", True)  # noqa: B010
    setattr(module.mix.bias, "use_muon", False)  # noqa: B010
    muon, adamw = muon_optimizer(module, [{"params": list(module.parameters())}], {"lr": 0.1}).param_groups
    assert names_in(module, muon) == {"mix.weight", "embed_out.weight"}
    assert names_in(module, muon) | names_in(module, adamw) == {name for name, _ in module.named_parameters()}
    setattr(module.conv.weight, "use_muon", True)  # noqa: B010
    with pytest.raises(ValueError, match=r"use_muon is True for a parameter of shape \(2, 2, 3\); Muon takes matrices"):
        muon_optimizer(module, [{"params": list(module.parameters())}], {})


def test_settings_of_muon_go_to_their_halves_and_those_of_a_group_go_first() -> None:
    module = Block()
    groups = [{"params": list(module.mix.parameters()), "lr": 1.0}, {"params": [module.wte.weight], "name": "table"}]
    params = {"lr": 0.5, "adam_lr": 0.25, "momentum": 0.8, "betas": [0.7, 0.8], "weight_decay": 0.1, "ns_steps": 3}
    first, second, third = muon_optimizer(module, groups, params).param_groups
    assert (first["lr"], first["momentum"], first["weight_decay"], first["ns_steps"]) == (1.0, 0.8, 0.1, 3)
    assert (second["lr"], second["betas"], second["weight_decay"], second["eps"]) == (1.0, (0.7, 0.8), 0.1, 1e-10)
    assert third["use_muon"] is False and third["lr"] == 0.25 and third["name"] == "table"
    (muon,) = muon_optimizer(module, [{"params": [module.mix.weight]}], {"lr": 0.5, "muon_lr": 0.125}).param_groups
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.125, 0.0, 0.95)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mu_lr": 0.1}, "Muon does not take mu_lr; it takes lr, momentum, .*muon_lr, adam_lr"),
        ({"per_head_muon": True}, "per_head_muon: not supported"),
    ],
)
def test_bad_parameters_of_muon_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon_optimizer(Block(), [{"params": [torch.zeros(2, 2)]}], params)


def test_a_group_of_muon_says_whether_it_is_muons() -> None:
    with pytest.raises(ValueError, match="use_muon None; expected True or False"):
        MuonWithAdamW([{"params": leaves(3)}])


# What an update depends on


class Own(torch.optim.Optimizer):
    """An optimizer as users write them: `update` is theirs."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.update(param, group))


class Momentum(Own):
    def update(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[param]
        state["moment"] = 0.9 * state.get("moment", 0.0) + param.grad
        return state["moment"]


class Lamb(Own):
    def update(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert param.grad is not None
        return param.grad * param.norm() / param.grad.norm()


class GlobalNorm(Own):
    def update(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert param.grad is not None
        return param.grad / torch.stack([other.grad.norm() for other in group["params"]]).norm()


class CountsCalls(Own):
    calls = 0

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert param.grad is not None
        self.calls += 1
        return param.grad * param.grad.norm() / self.calls


class WantsClosure(Momentum):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Lookahead(Momentum):
    def step(self, closure: Any = None) -> None:
        """Step nothing, as one that wraps another optimizer does."""


class Distance(Own):
    """As Prodigy and D-Adaptation: an estimate over all parameters, which begins to matter after some steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["travelled"] = 0.0

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert param.grad is not None
        group["travelled"] += float(param.grad.abs().sum())
        return param.grad * max(1.0, group["travelled"] - 1e6)


class SilentNorm(Own):
    """A norm that changes nothing but for gradients that are never tried."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert param.grad is not None
        return param.grad / torch.clamp(param.grad.norm() / 1e6, min=1.0)


class Averaging(Own):
    """As a schedule-free one: a mode for training, and numbers common to all parameters that count steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(training=False, steps=0)

    def train(self) -> None:
        for group in self.param_groups:
            group["training"] = True

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("not in train mode")
            group["steps"] += 1
        super().step()

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert param.grad is not None
        return param.grad / group["steps"]


class Wrapper:
    """Steps another optimizer, without being one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self) -> None:
        self.base.step()
        for group in self.param_groups:
            for param in group["params"]:
                with torch.no_grad():
                    param.mul_(0.99)


def scope(kind: Any, **more: Any) -> str:
    optimizer = kind(leaves(3), **more)
    return scope_of(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize("lr", [0.1, 0.0, torch.tensor(1e-6)])
def test_what_an_unknown_optimizers_update_depends_on_is_found_out(lr: Any) -> None:
    before = torch.random.get_rng_state()
    assert scope(Momentum, lr=lr) == "element"
    assert scope(Lamb, lr=lr) == "parameter"
    assert scope(GlobalNorm, lr=lr) == scope(CountsCalls, lr=lr) == scope(Distance, lr=lr) == "model"
    assert scope(SilentNorm, lr=lr) == "parameter"
    assert scope(Averaging, lr=lr) == "element"
    assert scope(lambda params, lr: Wrapper(Momentum(params, lr)), lr=lr) == "element"
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_optimizers_of_torch_are_known_and_trying_them_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [named._OPTIMIZERS[name.lower()] for name in ELEMENTWISE]
    assert {scope(kind) for kind in kinds} == {"element"}
    assert scope_of(torch.optim.Muon([torch.ones(2, 2)]), {"params": []}) == scope(torch.optim.Adafactor) == "parameter"
    tried = {kind: scope(type(kind.__name__, (kind,), {})) for kind in kinds}  # a subclass is not known
    assert tried == dict.fromkeys(kinds, "element")
    assert scope(type("Adafactor", (torch.optim.Adafactor,), {})) == "parameter"


def test_groups_of_one_optimizer_may_differ() -> None:
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    optimizer = MuonWithAdamW([{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}])
    assert [scope_of(optimizer, group) for group in optimizer.param_groups] == ["parameter", "element"]


def test_trying_leaves_the_optimizer_alone() -> None:
    optimizer = Momentum(leaves(3))
    optimizer.register_step_post_hook(lambda *args: pytest.fail("a hook ran"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    scope_of(optimizer, optimizer.param_groups[0])
    assert not optimizer.state and torch.equal(optimizer.param_groups[0]["params"][0], before)
    assert scheduler.get_last_lr() == [0.1]


class KeepsStepSizes(Own):
    """As some keep the step sizes that they have computed: in a list of the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["sizes"] = [None, None]
        self.seen = [[None]]

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert param.grad is not None
        self.seen[0][0] = group["lr"]
        if group["sizes"][0] is None:
            group["sizes"][0] = group["lr"]
        return param.grad * group["sizes"][0]


def test_trying_leaves_what_a_group_holds_alone() -> None:
    optimizer = KeepsStepSizes(leaves(3), lr=1e-3)
    assert scope_of(optimizer, optimizer.param_groups[0]) == "element"
    assert optimizer.param_groups[0]["sizes"] == [None, None]
    assert optimizer.seen == [[None]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WantsClosure, "untested ZeRO Optimizer, WantsClosure.*its step raised TypeError"),
        (Lookahead, "untested ZeRO Optimizer, Lookahead.*its step did not move them"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_the_reason(kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scope(kind)


# Refused by name


@pytest.mark.parametrize("type_name", ["LBFGS", "lbfgs", "SparseAdam", "OneBitAdam"])
def test_some_are_refused_by_name_with_the_reason(type_name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot train sharded parameters: it"):
        build_optimizer(leaves(3), type_name, {})


@pytest.mark.parametrize("type_name", ["Lamb", "MuAdam", "shampoo"])
def test_what_torch_does_not_have_may_be_given_as_an_instance(type_name: str) -> None:
    with pytest.raises(ValueError, match=f"{type_name}: torch has no such class; .* give the instance"):
        build_optimizer(leaves(3), type_name, {})


def test_the_names_of_torch_are_all_decided() -> None:
    names = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    whole = {kind.__name__ for kind in named.WHOLE}
    assert names <= {*ELEMENTWISE, *whole, *named._REFUSED, "Optimizer"}, "decide about the new one"


def test_an_instance_is_refused_by_its_class_and_its_bases() -> None:
    class MyLBFGS(torch.optim.LBFGS):
        pass

    refuse_known(torch.optim.AdamW(leaves(3)))
    with pytest.raises(ValueError, match="LBFGS cannot train sharded parameters"):
        refuse_known(MyLBFGS(leaves(3)))
