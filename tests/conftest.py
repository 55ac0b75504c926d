"""Loads the marker `world_size`, also where the package is not installed."""

import pytest

pytest_plugins = ["zerofunc_testing.pytest_plugin"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What kills processes is slow as well."""
    for item in items:
        if item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.slow)
