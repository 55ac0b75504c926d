"""Tests of the learning-rate schedules against their formulas, iteration by iteration."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from zerofunc.schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR, build_scheduler


def make_optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1,)]
    return torch.optim.SGD(groups)


def rates_of(scheduler: LRScheduler, num_steps: int) -> list[float]:
    """Return the first group's rate after each of `num_steps` calls of step: iteration 0, 1, ..."""
    rates = []
    for _ in range(num_steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


def log_warmup(iteration: int, num_steps: int) -> float:
    return math.log(iteration + 1) / math.log(num_steps)


def test_warmup_by_log_follows_its_formula_then_stays() -> None:
    scheduler = WarmupLR(make_optimizer(), warmup_min_lr=0.2, warmup_max_lr=1.2, warmup_num_steps=10)
    expected = [0.2 + log_warmup(i, 10) if i < 10 else 1.2 for i in range(15)]
    assert rates_of(scheduler, 15) == pytest.approx(expected)


def test_warmup_by_line_follows_its_formula_then_stays() -> None:
    scheduler = WarmupLR(make_optimizer(), 0.0, 2.0, warmup_num_steps=4, warmup_type="linear")
    assert rates_of(scheduler, 6) == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.0])


def test_warmup_has_the_defaults_of_deepspeed() -> None:
    scheduler = WarmupLR(make_optimizer())
    rates = rates_of(scheduler, 1002)
    assert rates[0] == 0.0 and rates[1] == pytest.approx(0.001 * math.log(2) / math.log(1000))
    assert rates[999] == pytest.approx(0.001) and rates[1001] == 0.001


def test_the_rate_before_the_first_step_is_the_minimum() -> None:
    optimizer = make_optimizer(0.1, 0.2)
    scheduler = WarmupLR(optimizer, warmup_min_lr=[0.01, 0.02], warmup_max_lr=[1.0, 2.0], warmup_num_steps=3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02] == scheduler.get_last_lr()
    rates_of(scheduler, 4)
    assert scheduler.get_last_lr() == [1.0, 2.0]


def test_warmup_of_one_step_counts_as_two() -> None:
    one, two = (WarmupLR(make_optimizer(), warmup_num_steps=n, warmup_type="linear") for n in (1, 2))
    assert rates_of(one, 4) == rates_of(two, 4) == pytest.approx([0.0, 0.0005, 0.001, 0.001])


def test_decay_falls_on_a_line_to_the_minimum_and_stays() -> None:
    scheduler = WarmupDecayLR(make_optimizer(), total_num_steps=8, warmup_max_lr=1.0, warmup_num_steps=4)
    expected = [log_warmup(i, 4) for i in range(4)] + [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    assert rates_of(scheduler, 11) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_cosine_scales_the_rate_of_each_group(kind: Any) -> None:
    optimizer = make_optimizer(2.0, 4.0)
    scheduler = WarmupCosineLR(
        optimizer, 10, warmup_min_ratio=0.2, warmup_num_steps=4, cos_min_ratio=0.1, warmup_type=kind
    )
    assert scheduler.get_last_lr() == [0.0, 0.0]
    warm = [log_warmup(i, 4) if kind == "log" else i / 4 for i in range(4)]
    ratios = [0.2 + 0.8 * w for w in warm]
    ratios += [0.1 + 0.9 * (1 + math.cos(math.pi * (i - 4 + 1) / 6)) / 2 for i in range(4, 10)] + [0.1] * 3
    assert rates_of(scheduler, 13) == pytest.approx([2.0 * ratio for ratio in ratios])
    assert scheduler.get_last_lr() == pytest.approx([0.2, 0.4])


def test_cosine_ends_at_its_default_ratio() -> None:
    scheduler = WarmupCosineLR(make_optimizer(1.0), total_num_steps=5, warmup_num_steps=2)
    assert rates_of(scheduler, 9)[-1] == pytest.approx(0.0001)


@pytest.mark.parametrize("kind", [WarmupDecayLR, WarmupCosineLR])
def test_a_total_shorter_than_warmup_warns(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zerofunc.schedules"):
        rates = rates_of(kind(make_optimizer(), total_num_steps=2, warmup_num_steps=4), 8)
    assert "total_num_steps 2 is less than warmup_num_steps 4" in caplog.text
    assert all(math.isfinite(rate) for rate in rates)


@pytest.mark.parametrize("type_name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_schedule_goes_on_from_its_state_dict(type_name: str) -> None:
    params = {"warmup_num_steps": 4} | ({} if type_name == "WarmupLR" else {"total_num_steps": 10})
    whole = rates_of(build_scheduler(make_optimizer(), type_name, params), 9)
    first = build_scheduler(make_optimizer(), type_name, params)
    rates_of(first, 5)
    second = build_scheduler(make_optimizer(), type_name, params)
    second.load_state_dict(first.state_dict())
    assert rates_of(second, 4) == whole[5:]


def test_a_schedule_goes_on_from_a_given_iteration() -> None:
    whole = rates_of(WarmupLR(make_optimizer(), warmup_num_steps=8), 6)
    optimizer = make_optimizer()
    optimizer.param_groups[0]["initial_lr"] = 0.1
    resumed = WarmupLR(optimizer, warmup_num_steps=8, last_batch_iteration=2)
    assert optimizer.param_groups[0]["lr"] == whole[2]
    assert rates_of(resumed, 3) == whole[3:]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"warmup_num_steps": 0}, "warmup_num_steps: expected an integer > 0, found 0"),
        ({"warmup_num_steps": 2.5}, "warmup_num_steps: expected an integer > 0, found 2.5"),
        ({"warmup_num_steps": math.inf}, "warmup_num_steps: expected an integer > 0, found inf"),
        ({"warmup_num_steps": "auto"}, "warmup_num_steps: expected an integer > 0, found 'auto'"),
        ({"warmup_type": "cubic"}, "warmup_type: expected 'log' or 'linear', found 'cubic'"),
        ({"warmup_max_lr": [1.0, 2.0]}, "warmup_max_lr: expected 1 rates, one per parameter group, found 2"),
        ({"warmup_min_lr": "auto"}, "warmup_min_lr: expected a number or a list of numbers, found 'auto'"),
        ({"warmup_steps": 3}, "WarmupLR does not take warmup_steps; it takes warmup_min_lr, warmup_max_lr"),
    ],
)
def test_bad_parameters_are_named_with_those_accepted(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="scheduler.params: WarmupLR") as caught:
        build_scheduler(make_optimizer(), "WarmupLR", params)
    assert message in str(caught.value)
    assert "it takes warmup_min_lr" in str(caught.value)


def test_an_integral_float_is_a_number_of_steps() -> None:
    scheduler = build_scheduler(make_optimizer(), "warmuplr", {"warmup_num_steps": 4.0})
    assert isinstance(scheduler, WarmupLR) and scheduler.warmup_num_steps == 4


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="WarmupDecayLR refused .*total_num_steps"):
        build_scheduler(make_optimizer(), "WarmupDecayLR", {})


@pytest.mark.parametrize(
    ("type_name", "params"),
    [
        ("StepLR", {"step_size": 2}),
        ("CosineAnnealingLR", {"T_max": 5}),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False}),
        ("LambdaLR", {"lr_lambda": lambda step: 0.5}),
        ("LinearLR", {}),
    ],
)
def test_a_schedule_of_torch_is_found_by_name(type_name: str, params: dict[str, Any]) -> None:
    scheduler = build_scheduler(make_optimizer(), type_name, params)
    assert type(scheduler) is getattr(torch.optim.lr_scheduler, type_name)


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(ValueError, match="found 'WarmupCosinLR'; did you mean WarmupCosineLR"):
        build_scheduler(make_optimizer(), "WarmupCosinLR", {})
    with pytest.raises(ValueError, match="found 'LRScheduler'"):
        build_scheduler(make_optimizer(), "LRScheduler", {})


@pytest.mark.parametrize(
    "type_name", ["OneCycle", "LRRangeTest", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler"]
)
def test_what_cannot_be_built_from_a_configuration_says_why(type_name: str) -> None:
    with pytest.raises(ValueError, match=f"{type_name} cannot be built from a configuration: it"):
        build_scheduler(make_optimizer(), type_name, {})
