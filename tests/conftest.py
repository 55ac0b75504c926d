"""Loads the marker `world_size`, also where the package is not installed, and keeps the fast tests fast."""

from types import SimpleNamespace

import pytest

pytest_plugins = ["zerofunc_testing.pytest_plugin"]


NONE = SimpleNamespace(params={})
# Where gradients are reduced is what tells stage 1 from stage 2: these files ask about it.
ABOUT_REDUCTION = {"test_training", "test_accumulation", "test_memory"}
# Models of other libraries are large: there stage 3 alone is fast.
OF_LIBRARIES = {"test_generate", "test_lora", "test_experts"}
# Where derivatives of operators are asked about, stage 0 runs the same kernels.
ABOUT_KERNELS = {"test_third_order", "test_inference_mode", "test_recomputed_kernels", "test_odd_parameters"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Stages 1 and 2 are slow tests where 3 is tested as well: on one rank, and in files that do not ask about them."""
    for item in items:
        if item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.slow)
    staged = [(item, item.callspec.params) for item in items if "stage" in getattr(item, "callspec", NONE).params]
    with_stage_3 = {item.function for item, parameters in staged if parameters["stage"] == 3}
    for item, parameters in staged:
        stage, has_stage_3, file = parameters["stage"], item.function in with_stage_3, item.path.stem
        is_elsewhere = has_stage_3 and file not in ABOUT_REDUCTION
        if stage in (1, 2) and (parameters.get("world_size") == 1 or is_elsewhere):
            item.add_marker(pytest.mark.slow)
        if stage == 0 and has_stage_3 and file in OF_LIBRARIES | ABOUT_KERNELS:
            item.add_marker(pytest.mark.slow)
