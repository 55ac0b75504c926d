"""Loads the marker `world_size`, also where the package is not installed."""

pytest_plugins = ["zerofunc.pytest_plugin"]
