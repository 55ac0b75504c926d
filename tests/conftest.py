"""Loads the marker `world_size`, also where the package is not installed, and keeps the fast tests fast."""

from types import SimpleNamespace

import pytest

pytest_plugins = ["zerofunc.pytest_plugin"]


NONE = SimpleNamespace(params={})
# Where gradients are reduced is what tells stage 1 from stage 2: these files ask about it.
ABOUT_REDUCTION = {"test_training", "test_accumulation", "test_memory", "test_transforms", "test_precision"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Stages that run the code of another one are slow tests: 1 and 2 on one rank, and 1 where 2 is tested as well."""
    staged = [(item, item.callspec.params) for item in items if "stage" in getattr(item, "callspec", NONE).params]
    with_stage_2 = {item.function for item, parameters in staged if parameters["stage"] == 2}
    for item, parameters in staged:
        stage, ranks = parameters["stage"], parameters.get("world_size")
        if ranks == 1:
            is_twin = stage in (1, 2)
        else:
            is_twin = stage == 1 and item.function in with_stage_2 and item.path.stem not in ABOUT_REDUCTION
        if is_twin:
            item.add_marker(pytest.mark.slow)
