"""The list of planted defects fits the source and the tests; `make test-mutants` plants them."""

from pathlib import Path

import pytest

import zerofunc
from mutants.defects import DEFECTS

TESTS = Path(__file__).parent


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_a_defect_has_its_place_and_its_tests(defect):
    text = (Path(zerofunc.__file__).parent / defect.file).read_text()
    assert text.count(defect.old) == 1 and defect.new != defect.old
    assert defect.tests
    for name in defect.tests.split():
        file, _, function = name.partition("::")
        assert f"def {function}" in (TESTS / f"{file}.py").read_text()
