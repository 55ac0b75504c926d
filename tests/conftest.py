"""Loads the marker `world_size`, also where the package is not installed, and keeps the fast tests fast."""

import pytest

pytest_plugins = ["zerofunc.pytest_plugin"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """On one rank stages 1 and 2 run the code of stage 0: these are slow tests, beside stages 0 and 3."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("world_size") == 1 and parameters.get("stage") in (1, 2):
            item.add_marker(pytest.mark.slow)
