"""The cases of llm-comply, which compares answers with the published schemas of Open Responses and of Anthropic."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

llm_comply = pytest.importorskip("llm_comply")
config, runner, schema, tests = (
    pytest.importorskip(f"llm_comply.{name}") for name in ("config", "runner", "schema", "tests")
)

SPECS = Path(llm_comply.__file__).parent / "specs"
FORMATS = {"open-responses": "openresponses.json", "anthropic": "anthropic.json"}
# What this service does otherwise: text is all that it reads, one model needs no name, and nobody sums thoughts up.
OTHERWISE = {"image-input", "anth-image-input", "error-handling", "reasoning-summary"}
CASES = [(name, case) for name in FORMATS for case in tests.get_tests(name) if case.id not in OTHERWISE]


def bounded(body: dict[str, Any]) -> dict[str, Any]:
    """The body, so that a model of random weights ends its answer."""
    for tool in body.get("tools", ()):
        place = tool.get("parameters", tool.get("input_schema"))
        place["properties"]["location"]["maxLength"] = 8
        place["additionalProperties"] = False
    if isinstance(body.get("tool_choice"), dict):
        body["tool_choice"]["disable_parallel_tool_use"] = True
    if "thinking" in body:
        body["thinking"]["budget_tokens"] = 64
    return {**body, "temperature": 0} if "tools" in body else {**body, "choice": ["Hello"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "case"), CASES, ids=[case.id for _, case in CASES])
def test_a_case_is_passed(service_url, name, case):
    bound = dataclasses.replace(case, build_request=lambda given: bounded(case.build_request(given)), skip_reason=None)
    settings = config.ComplianceConfig(
        base_url=f"{service_url}/v1", api_key="none", model="able", extra_headers={"anthropic-version": "2023-06-01"}
    )
    found = runner.TestRunner(settings, [bound], schema.SpecLoader(str(SPECS / FORMATS[name]))).run_one(bound)
    assert found.errors == []
