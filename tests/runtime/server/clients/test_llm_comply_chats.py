"""The cases of llm-comply that compare chats with the schemas that OpenAI has published."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

llm_comply = pytest.importorskip("llm_comply")
config, runner, schema, tests = (
    pytest.importorskip(f"llm_comply.{name}") for name in ("config", "runner", "schema", "tests")
)

SPEC = Path(llm_comply.__file__).parent / "specs" / "openai_chat.json"
# What this service does otherwise: text is all that it reads, and one model needs no name. Nobody sums thoughts up.
OTHERWISE = {"chat-image-input", "chat-error-handling", "chat-reasoning-summary"}
CASES = [case for case in tests.get_tests("openai-chat") if case.id not in OTHERWISE]


def bounded(body: dict[str, Any]) -> dict[str, Any]:
    """The body, so that a model of random weights ends its answer."""
    for tool in body.get("tools", ()):
        tool["function"]["parameters"]["properties"]["location"]["maxLength"] = 8
        tool["function"]["parameters"]["additionalProperties"] = False
    return {**body, "parallel_tool_calls": False} if "tools" in body else {**body, "choice": ["Hello"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_a_case_is_passed(service_url, case):
    bound = dataclasses.replace(case, build_request=lambda given: bounded(case.build_request(given)))
    settings = config.ComplianceConfig(base_url=f"{service_url}/v1", api_key="none", model="able")
    found = runner.TestRunner(settings, [bound], schema.SpecLoader(str(SPEC))).run_one(bound)
    assert found.errors == []
    assert [said for said in found.warnings if "missing" in said] == []
