"""The pytest marker `world_size`: a marked test's body runs on every rank of a kept `RankPool`.

    @pytest.mark.world_size(2)
    def test_sum(): ...                  # on each of two ranks

    @pytest.mark.world_size(1, 2, 4)
    def test_sizes(world_size): ...      # three tests; the argument is optional

The test must be a function of a module. Its fixtures and parameters are made once, here, and pickled to the ranks.
Failing assertions are explained as usual, by rank. `@pytest.mark.world_size(2, timeout_s=10)` ends a test earlier.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

from zerofunc_testing.pool import RankError, close_shared_pools, shared_pool
from zerofunc_testing.rank_process import pack, unpack


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line(
        "markers", "world_size(n, ..., timeout_s=None): run the test's body on every rank of a pool of n processes"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes one test per world size of a marker that lists several."""
    marker = metafunc.definition.get_closest_marker("world_size")
    if marker is None:
        return
    if not marker.args or not all(isinstance(size, int) and size > 0 for size in marker.args):
        message = f"{metafunc.definition.nodeid}: world_size takes positive integers, found {marker.args}"
        pytest.fail(message, pytrace=False)
    if len(marker.args) > 1:
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", marker.args, indirect=True, ids=[f"{size}ranks" for size in marker.args])


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks that run the test."""
    return _world_size(request.node)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a marked test on the ranks."""
    marker = pyfuncitem.get_closest_marker("world_size")
    if marker is None:
        return None
    if pyfuncitem.cls is not None:
        pytest.fail("a test marked world_size must be a function of a module, not a method", pytrace=False)
    names = pyfuncitem._fixtureinfo.argnames  # the arguments of the body, without autouse fixtures
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    failure = _unpicklable(arguments)
    if not failure:
        body = _Body(pyfuncitem.module.__name__, str(pyfuncitem.path), pyfuncitem.originalname, pack(arguments))
        try:
            results = shared_pool(_world_size(pyfuncitem)).run(body, timeout_s=marker.kwargs.get("timeout_s"))
        except RankError as error:
            failure = str(error)
    if failure:  # reported outside of the except clause, or pytest shows both errors
        pytest.fail(failure, pytrace=False)
    for rank, result in enumerate(results):
        if isinstance(result, _Skip):
            pytest.skip(f"on rank {rank}: {result.reason}")
    return True


def pytest_sessionfinish() -> None:
    """Ends the rank processes."""
    close_shared_pools()


def _unpicklable(arguments: dict[str, object]) -> str:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            return f"the argument {name!r} of a test marked world_size must be picklable: {error}"
    return ""


def _world_size(item: pytest.Item) -> int:
    marker = item.get_closest_marker("world_size")
    if marker is None:
        pytest.fail("the fixture world_size is for tests marked world_size", pytrace=False)
    callspec = getattr(item, "callspec", None)
    return int(callspec.params.get("world_size", marker.args[0]) if callspec else marker.args[0])


# ---- the ranks' side ---------------------------------------------------------------------------------------------


class _Skip(NamedTuple):
    reason: str


@dataclass(frozen=True)
class _Body:
    """A test's body, called on a rank."""

    module: str
    file: str
    function: str
    arguments: bytes

    def __str__(self) -> str:
        return self.function

    def __call__(self) -> _Skip | None:
        if self.module not in sys.modules:
            _import_test_module(self.module, self.file)
        function = getattr(sys.modules[self.module], self.function)
        try:
            function(**unpack(self.arguments))
        except pytest.skip.Exception as skip:
            return _Skip(str(skip))
        return None


def _import_test_module(name: str, file: str) -> None:
    """Imports from the file, whatever pytest's import mode, with explained assertions."""
    if "hypothesis" in Path(file).read_text(encoding="utf-8"):
        _draw_alike()
    spec = importlib.util.spec_from_file_location(name, file, loader=_RewritingLoader(name, file))
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
    except BaseException:
        del sys.modules[name]
        raise


def _draw_alike() -> None:
    """Makes hypothesis draw the same examples on every rank."""
    import hypothesis

    hypothesis.settings.register_profile("ranks", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("ranks")


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        return self.source_to_code(self.get_data(self.path), self.path)  # never through __pycache__

    def source_to_code(self, data: Any, path: Any, *args: Any, **kwargs: Any) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data, path)
        try:
            from _pytest.assertion.rewrite import rewrite_asserts
        except ImportError:  # private to pytest: without it assertions are left unexplained
            pass
        else:
            rewrite_asserts(tree, data, path)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code
