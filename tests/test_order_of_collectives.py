"""Ranks that use different parameters: every program ends, with the values of one process."""

import pytest
import torch.distributed as dist

from programs import draw, run


def run_number(number):
    program = draw(number, dist.get_world_size())
    try:
        run(program)
    except Exception as error:
        raise AssertionError(f"program {number}: {program}") from error


@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", range(10))
def test_programs_whose_ranks_differ_equal_one_process(number):
    run_number(number)


@pytest.mark.slow
@pytest.mark.world_size(2, 3, timeout_s=300)
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_many_programs_whose_ranks_differ_equal_one_process(first):
    for number in range(first, first + 20):
        run_number(number)
