"""Claude Code's own requests, recorded, sent to a model that calls tools and one that also thinks."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from doubles.serving import ABLE_TEMPLATE, retold, serving

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.guarded import Guarded

RECORD = json.loads((Path(__file__).parents[2] / "data" / "agents" / "claude_code.json").read_text())
REQUESTS = {each["name"]: each["body"] for each in RECORD["requests"]}
# The small model has 512 positions where Claude Code wants 131,072: the oldest tokens leave.
SMALL = {"on_overflow": "truncate_left"}
WAIT_S = 60.0  # for what happens at once, on a machine that does much else
# As Qwen 2.5's: it teaches calls and no thoughts.
CALLING_TEMPLATE = ABLE_TEMPLATE.replace("<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}", "").replace(
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}", ""
)

# As DeepSeek-R1's: it always thinks.
THINKING_TEMPLATE = ABLE_TEMPLATE.replace("{% if not enable_thinking %}\n</think>\n\n{% endif %}", "")


@pytest.fixture(scope="module")
def agents(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service with the models ``calls``, ``thinks`` where it is asked to, and ``always`` thinks."""
    folder = tmp_path_factory.mktemp("agents")
    models = {
        "calls": retold(tiny_bundle, folder / "calls", CALLING_TEMPLATE),
        "thinks": retold(tiny_bundle, folder / "thinks"),
        "always": retold(tiny_bundle, folder / "always", THINKING_TEMPLATE),
    }
    with serving(ServerConfig(models=models, threads=1), Guarded) as url:
        with httpx.Client(base_url=url, timeout=WAIT_S, headers=RECORD["headers"]) as client:
            yield client


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("model", ["calls", "thinks"])
@pytest.mark.parametrize("streams", [True, False])
def test_claude_codes_requests_are_answered(agents, name, model, streams):
    body = {**REQUESTS[name], **SMALL, "model": model, "stream": streams, "max_tokens": 4}
    answer = agents.post(RECORD["path"], json=body)
    assert answer.status_code == 200, answer.text
    ended = '"stop_reason":"max_tokens"' in answer.text.replace(" ", "")
    assert ended or "end_turn" in answer.text
    assert (streams and '"type":"thinking"' in answer.text) == ("signature_delta" in answer.text)
    named = answer.headers.get("x-llmc-ignored", "")
    assert ("output_config.effort" in named) == (model == "calls")


@pytest.mark.parametrize("name", REQUESTS)
def test_the_official_client_counts_them(agents, name):
    body = {key: value for key, value in REQUESTS[name].items() if key not in ("stream", "max_tokens", "metadata")}
    with anthropic.Anthropic(base_url=str(agents.base_url), api_key="none", max_retries=0) as client:
        counted = client.beta.messages.count_tokens(**{**body, "model": "calls"}).input_tokens
    assert counted > 50
    if name == "title":  # the one that the small model has room for
        whole = agents.post(RECORD["path"], json={**REQUESTS[name], "model": "calls", "stream": False, "max_tokens": 1})
        usage = whole.json()["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_one_that_is_cancelled_ends(agents):
    body: dict[str, Any] = {**REQUESTS["first"], **SMALL, "model": "thinks", "max_tokens": 400, "ignore_eos": True}
    with agents.stream("POST", RECORD["path"], json=body) as answer:
        assert answer.status_code == 200 and next(answer.iter_bytes())
    until = time.monotonic() + WAIT_S
    while 'running{model_name="thinks"} 0.0' not in agents.get("/metrics").text:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_thoughts_that_the_template_always_begins_end_at_once_where_they_are_unwanted(agents):
    body = {**REQUESTS["title"], "model": "always", "max_tokens": 12, "thinking": {"type": "disabled"}}
    body["output_config"] = {"effort": "high"}
    whole = agents.post(RECORD["path"], json={**body, "stream": False}).json()
    assert [block["type"] for block in whole["content"]] == ["text"]
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
    streamed = agents.post(RECORD["path"], json=body).text
    assert "text_delta" in streamed and "thinking_delta" not in streamed
