"""Requests of coding agents, as they sent them: the first one of a session, and the one with the result of a call.

Long texts are shortened; every key, type and name is as the agent wrote it. recipes/serve/README.md says how each agent
is set up.
"""

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

FILES = sorted((Path(__file__).parents[3] / "data" / "agents").glob("*.json"))
RECORDED: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
FOLLOWED = {"reasoning.effort", "text.verbosity"}  # hints that this model can follow, unlike the one of the recording
# The small model has 512 positions where agents want 131,072: the oldest tokens leave, and the answer is short.
SMALL = {"on_overflow": "truncate_left"}
LONGEST = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}


TURNS = [(agent, turn) for agent, told in RECORDED.items() for turn in ("first", "second") if turn in told]


@pytest.mark.parametrize(("name", "turn"), TURNS)
def test_agents_are_answered(service_url, name, turn):
    agent = RECORDED[name]
    said = "input" if "input" in agent["first"] else "messages"
    body = {**agent["first"], **SMALL, LONGEST[agent["path"]]: 1}
    body[said] = agent["second"] if turn == "second" else body[said]
    answer = httpx.post(f"{service_url}{agent['path']}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    events = answer.text.strip().split("\n\n")
    assert "response.incomplete" in events[-1] if said == "input" else events[-1] == "data: [DONE]"
    ignored = answer.headers.get("x-llmc-ignored")
    assert set(ignored.split(", ") if ignored else []) == {*agent["ignored"]} - FOLLOWED


def test_the_agents_that_are_promised_are_tried():
    assert RECORDED.keys() >= {
        "codex",
        "codex_custom_tools",
        "codex_additional_tools",
        "qwen",
        "opencode",
        "cn",
        "aider",
    }
    assert all(path.stat().st_size < 10_500 for path in FILES)
