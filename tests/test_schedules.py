"""Tests of the learning-rate schedules against their formulas and DeepSpeed's numbers, iteration by iteration."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

import zerofunc
from zerofunc.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, build_scheduler


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
    scheduler = WarmupLR(make_optimizer(0.001))
    rates = rates_of(scheduler, 1002)
    assert rates[0] == 0.0 and rates[1] == pytest.approx(0.001 * math.log(2) / math.log(1000))
    assert rates[999] == pytest.approx(0.001) and rates[1001] == 0.001
    several = make_optimizer(0.1, 0.2)
    rates_of(WarmupLR(several, warmup_num_steps=2), 3)
    assert [group["lr"] for group in several.param_groups] == [0.1, 0.2]


def test_the_rate_before_the_first_step_is_the_minimum() -> None:
    optimizer = make_optimizer(0.1, 0.2)
    scheduler = WarmupLR(optimizer, warmup_min_lr=[0.01, 0.02], warmup_max_lr=[1.0, 2.0], warmup_num_steps=3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02] == scheduler.get_last_lr()
    rates_of(scheduler, 4)
    assert scheduler.get_last_lr() == [1.0, 2.0]


def test_warmup_of_one_step_counts_as_two() -> None:
    one, two = (WarmupLR(make_optimizer(0.001), warmup_num_steps=n, warmup_type="linear") for n in (1, 2))
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


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 2, "decay_step_size": 1, "decay_lr_rate": 1}
GOING_ON = {
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_num_steps": 4, "total_num_steps": 10},
    "WarmupCosineLR": {"warmup_num_steps": 4, "total_num_steps": 10},
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": CYCLE,
}


@pytest.mark.parametrize("type_name", GOING_ON)
def test_a_schedule_goes_on_from_its_state_dict(type_name: str) -> None:
    params: dict[str, Any] = GOING_ON[type_name]  # type: ignore[assignment]
    whole = rates_of(build_scheduler(make_optimizer(), type_name, params), 9)
    first = build_scheduler(make_optimizer(), type_name, params)
    rates_of(first, 5)
    second = build_scheduler(make_optimizer(), type_name, params)
    second.load_state_dict(first.state_dict())
    assert rates_of(second, 4) == whole[5:]
    assert first.last_batch_iteration == 4 and second.last_batch_iteration == 8


def test_a_schedule_goes_on_from_a_given_iteration() -> None:
    whole = rates_of(WarmupLR(make_optimizer(), warmup_num_steps=8), 6)
    optimizer = make_optimizer()
    optimizer.param_groups[0]["initial_lr"] = 0.1
    resumed = WarmupLR(optimizer, warmup_num_steps=8, last_batch_iteration=2)
    assert optimizer.param_groups[0]["lr"] == whole[2]
    assert rates_of(resumed, 3) == whole[3:]
    resumed.step(1)
    assert resumed.get_last_lr() == [whole[1]]


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


@pytest.mark.parametrize("type_name", ["ReduceLROnPlateau", "SequentialLR", "ChainedScheduler"])
def test_what_cannot_be_built_from_a_configuration_says_why(type_name: str) -> None:
    with pytest.raises(ValueError, match=f"{type_name} cannot be built from a configuration: it"):
        build_scheduler(make_optimizer(), type_name, {})


# Against DeepSpeed. The numbers are those of deepspeed 0.19.8, `(rates, first betas)` of the first group before the
# first step and after each, rounded to 12 digits.

STAIRS = [0.1, 0.1, 0.55, 0.55, 1.0, 0.7, 0.7, 0.4, 0.4, 0.1, 0.1, 0.1]
UPSTREAM: dict[str, tuple[str, dict[str, Any], list[float], list[float] | None]] = {
    "range": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0},
        [0.01, 0.016666666667, 0.023333333333, 0.03, 0.036666666667, 0.043333333333, 0.05, 0.056666666667],
        None,
    ),
    "range in stairs": (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [0.01],
            "lr_range_test_step_size": 3,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
        [0.01, 0.01, 0.01, 0.03, 0.03, 0.03, 0.05, 0.05],
        None,
    ),
    "cycle and decay": (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "decay_lr_rate": 0.5,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 5,
            "decay_step_size": 2,
            "decay_mom_rate": 0.1,
        },
        [0.1, 0.4, 0.7, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.08, 0.066666666667, 0.057142857143, 0.05],
        [0.8, 0.866666666667, 0.833333333333, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.945, 0.99, 1.035, 1.08],
    ),
    "cycle in stairs": (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 6,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 3,
            "cycle_min_mom": 0.7,
            "cycle_max_mom": 0.95,
        },
        STAIRS,
        [0.7, *(0.95 - 0.25 * (rate - 0.1) / 0.9 for rate in STAIRS[1:])],
    ),
    "cycle of rates alone": (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
            "cycle_momentum": False,
        },
        [0.1, 0.1, 0.55, 0.55, 1.0, 0.55, 0.55, 0.1, 0.1, 0.1, 0.1],
        None,
    ),
    "warmup": ("WarmupLR", {"warmup_num_steps": 4}, [0.0, 0.0, 0.05, 0.079248125036, 0.1, 0.1, 0.1], None),
    "decay": (
        "WarmupDecayLR",
        {"total_num_steps": 7, "warmup_num_steps": 3, "warmup_min_lr": 0.01, "warmup_max_lr": 0.5},
        [0.01, 0.01, 0.31915557925, 0.5, 0.5, 0.3775, 0.255, 0.1325, 0.01, 0.01],
        None,
    ),
    "cosine": (
        "WarmupCosineLR",
        {"total_num_steps": 7, "warmup_num_steps": 3, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05},
        [0.0, 0.01, 0.066783677821, 0.1, 0.086087572106, 0.0525, 0.018912427894, 0.005, 0.005, 0.005],
        None,
    ),
}


@pytest.mark.parametrize("case", UPSTREAM)
def test_rates_and_betas_are_those_of_deepspeed(case: str) -> None:
    type_name, params, rates, betas = UPSTREAM[case]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = build_scheduler(optimizer, type_name, params)
    found = []
    for _ in rates:
        group = optimizer.param_groups[0]
        assert scheduler.get_last_lr() == [group["lr"]]
        found.append((group["lr"], *group["betas"]))
        scheduler.optimizer.step()
        scheduler.step()
    assert [rate for rate, _, _ in found] == pytest.approx(rates, rel=1e-9)
    assert [beta for _, beta, _ in found] == pytest.approx(betas or [0.9] * len(rates), rel=1e-9)
    assert {second for _, _, second in found} == {0.99 if betas else 0.999}


def test_rates_and_betas_of_a_cycle_may_differ_by_group() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    scheduler = OneCycle(torch.optim.AdamW(groups), [0.1, 0.2], [1.0, 2.0], 0.0, 2, cycle_max_mom=[0.9, 0.95])
    rates_of(scheduler, 1)
    assert scheduler.get_last_lr() == pytest.approx([0.55, 1.1])
    assert scheduler.get_mom() == [pytest.approx((0.85, 0.99)), pytest.approx((0.875, 0.99))]
    assert LRRangeTest(torch.optim.AdamW(groups), [0.1, 0.2]).get_last_lr() == [0.1, 0.2]


def test_an_optimizer_without_betas_cycles_its_rate_alone(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = OneCycle(make_optimizer(), 0.1, 1.0, cycle_first_step_size=2)
    assert "SGD has no betas" in caplog.text
    assert rates_of(scheduler, 4) == pytest.approx([0.55, 1.0, 0.55, 0.1]) and scheduler.get_mom() is None


@pytest.mark.parametrize(
    ("type_name", "params", "message"),
    [
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "cycle_first_step_size: expected an integer > 0, found 0"),
        ("OneCycle", {**CYCLE, "decay_step_size": -1}, "decay_step_size: expected an integer >= 0, found -1"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "missing .* 'cycle_max_lr'"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size: expected an integer > 0, found 0"),
        ("LRRangeTest", {"lr_range_test_min_lr": [1, 2]}, "lr_range_test_min_lr: expected 1 rates"),
    ],
)
def test_bad_parameters_of_a_sweep_are_named(type_name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_scheduler(make_optimizer(), type_name, params)


# In an engine


@pytest.mark.world_size(1)
def test_a_schedule_that_takes_a_metric_gets_it_from_the_engines_step() -> None:
    engine = zerofunc.initialize(
        torch.nn.Linear(2, 1),
        {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}},
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    )[0]
    for metric in (1.0, 0.5, 0.5, 0.6):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step({"metrics": metric})
    assert engine.get_lr() == [0.25]
