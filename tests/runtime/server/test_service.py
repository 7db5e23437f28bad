"""Bounds of what requests may ask for."""

from typing import Any

import pytest

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.service import Service

POOL: Any = None  # nothing here needs a model
BOUNDED = Service(ServerConfig(max_request_tokens=50, request_deadline_s=5.0), POOL)


def test_a_request_may_ask_for_so_many_tokens_of_all_its_outputs():
    assert BOUNDED.bounded({"n": 2, "max_tokens": 25})["max_tokens"] == 25
    assert BOUNDED.bounded({"n": 3})["max_tokens"] == 16
    assert BOUNDED.bounded({"max_tokens": 0})["max_tokens"] == 0  # which the engine refuses by name


@pytest.mark.parametrize(("asked", "param"), [({"max_tokens": 51}, "max_tokens"), ({"n": 51}, "n")])
def test_more_is_refused_by_the_name_of_what_is_too_much(asked: dict[str, Any], param: str):
    with pytest.raises(ApiError) as refused:
        BOUNDED.bounded(asked)
    assert refused.value.status == 400 and refused.value.param == param


def test_a_deadline_may_be_shorter_and_not_longer():
    assert BOUNDED.bounded({"deadline_s": 1.0})["deadline_s"] == 1.0
    assert BOUNDED.bounded({"deadline_s": 9.0})["deadline_s"] == 5.0
