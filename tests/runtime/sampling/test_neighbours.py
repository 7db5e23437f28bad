"""Names of other programs lead to llmc's, which exist."""

import pytest

from llmc.cli.main import SHORT
from llmc.cli.run import run_command
from llmc.cli.serve import serve_command
from llmc.errors import UsageError
from llmc.runtime import load
from llmc.runtime.sampling.neighbours import _OTHERS, neighbour
from llmc.runtime.sampling.params import PARAMETERS, SamplingParams


def test_every_name_is_one_that_a_user_can_say():
    known = {parameter.name for command in (run_command, serve_command) for parameter in command.params}
    assert {*_OTHERS, *SHORT.values()} - {*known, "system", "output"} == set()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("repeat_penalty", "repetition_penalty"),
        ("max_new_tokens", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("tempp", "temperature"),
        ("top_q", "top_p"),
        ("num_ctx", None),
    ],
)
def test_the_nearest_parameter_is_found(name, ours):
    assert neighbour(name, PARAMETERS) == ours


def test_python_names_it(tiny_bundle, manifest):
    with pytest.raises(UsageError, match=r"max_new_tokens is .* did you mean max_tokens"):
        SamplingParams.from_defaults(manifest.generation, max_new_tokens=3)
    with pytest.raises(UsageError, match=r"num_ctx is .* did you mean max_context"):
        load(tiny_bundle, num_ctx=3)
