"""A diffusion model behind the service: whole answers, streams, its parameters, what it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from doubles.serving import serving

from llmc.runtime import load
from llmc.runtime.server.config import ServerConfig

ASKED = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def service(diffusion_models: Path) -> Iterator[httpx.Client]:
    with serving(ServerConfig(models={"dream": diffusion_models / "Dream-fp32"}, threads=1)) as url:
        with httpx.Client(base_url=f"{url}/v1", timeout=60) as client:
            yield client


def test_answers_are_those_of_the_model_whole_and_streamed(service, diffusion_models):
    body = {"messages": MESSAGES, **ASKED, "block_length": 16}
    with load(diffusion_models / "Dream-fp32", threads=1, self_test=False) as model:
        said, text = model.chat(MESSAGES, **ASKED, block_length=16).text, model.generate("import os", **ASKED).text
    whole = service.post("/chat/completions", json=body).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (said, "length")
    lines = service.post("/chat/completions", json={**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == said
    completion = service.post("/completions", json={"prompt": "import os", **ASKED}).json()
    assert completion["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"block_length": 0}, "block_length"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(service, more, name):
    answer = service.post("/chat/completions", json={"messages": MESSAGES, **ASKED, **more})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
