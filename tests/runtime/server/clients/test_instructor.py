"""instructor: answers as pydantic's objects, in each of its ways to ask for them."""

from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

instructor = pytest.importorskip("instructor")
pytestmark = pytest.mark.filterwarnings("ignore")


class Add(BaseModel):
    """Add."""

    model_config = ConfigDict(extra="forbid")  # or else these weights invent members without end
    word: Literal["one", "two"]


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_answer_is_an_object(service_url: str, mode: str, streams: bool):
    plain = openai.OpenAI(base_url=f"{service_url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
    # What JSON asks for is any object, so that these weights are told which one.
    form = {"extra_body": {"response_format": {"type": "json_object", "schema": Add.model_json_schema()}}}
    told = {"JSON_SCHEMA": {}, "JSON": form}.get(mode, {"parallel_tool_calls": False})
    given = {"model": "able", "messages": [{"role": "user", "content": "Sum."}], **told}
    if streams:
        answer = list(client.create_partial(response_model=Add, max_retries=0, **given))[-1]
    else:
        answer = client.create(response_model=Add, max_retries=0, **given)
    assert answer.word in ("one", "two")
