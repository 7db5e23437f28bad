"""The check of Arm, as far as it goes without emulating one: what it installs, and how it counts."""

from pathlib import Path
from types import ModuleType

import pytest
from doubles.modules import load_file

SCRIPT = Path(__file__).parents[2] / "recipes" / "arm_check.py"
REPORT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><failure>assert 1 == 2</failure></testcase>
<testcase name="c"><error>fixture</error></testcase>
<testcase name="d"><skipped/></testcase>
<testcase name="e"><failure>ModuleNotFoundError: No module named 'torch'</failure></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load_file(SCRIPT)


def test_what_lacks_a_large_package_is_skipped_and_all_else_that_does_not_pass_has_failed(check):
    assert check.count(REPORT) == (1, 2, 2)
    assert check.count(REPORT.replace("'torch'", "'numpy'")) == (1, 3, 1)


def test_wheels_are_those_of_the_project_without_what_is_too_large(check):
    names = {each.split(">")[0] for each in check.requirements()}
    assert names > {"onnxruntime", "tokenizers", "llguidance", "fastapi", "pytest"}
    assert names.isdisjoint({"torch", "transformers", "llmc-deploy[build]"})
