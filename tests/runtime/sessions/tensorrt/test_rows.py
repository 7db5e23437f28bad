"""Rows of a batch beside each row alone, as a build compares them, on doubles that mix them up and that do not."""

import pytest

from llmc.errors import BuildError
from llmc.optimize.judge.rows import check_rows


@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_rows_that_are_what_they_are_alone_pass(bundle, compute):
    setup = bundle(compute)
    check_rows(setup.open(), setup.manifest)
    assert any(shapes["input_ids"][0] > 1 for context in setup.library.contexts for shapes in context.history)


def test_rows_that_are_mixed_up_fail_the_build(bundle):
    setup = bundle()
    setup.library.mixes_rows = True
    with pytest.raises(BuildError, match=r"row 1 of 4 that decode together has logits .* build with --max-batch 1"):
        check_rows(setup.open(), setup.manifest)
