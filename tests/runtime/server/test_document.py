"""The OpenAPI document and the service say the same, for requests that a machine makes up from it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from doubles.serving import serving
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from llmc.runtime.server.config import ServerConfig

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
HEADERS = {"anthropic-version": "2026-10-21"}
# Of each operation and kind of data; runtime/server/README.md has the command for more of them.
EXAMPLES = 4
SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
# Models that the machine does not guess; the first one is asked where none is named.
MODELS = {"/v1/embeddings": "embed", "/v1/rerank": "rank"}


@pytest.fixture(scope="module")
def document(able_bundle: Path, encoder_bundles: dict[str, Path]) -> Iterator[Any]:
    """The document of a service that lets no request take long."""
    models = {"able": able_bundle, **encoder_bundles}
    config = ServerConfig(models=models, threads=1, max_request_tokens=4, request_deadline_s=10.0)
    with serving(config) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


def conforms(operation: Any, mode: GenerationMode) -> None:
    """Send an operation's requests, of data that fit the document or of data that do not."""

    @SETTINGS
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def answered(case: Any) -> None:
        if operation.path in MODELS and isinstance(case.body, dict):
            case.body["model"] = MODELS[operation.path]
        case.call_and_validate(headers=HEADERS, checks=CHECKS)

    answered()


@pytest.mark.threat("documented-answers")
@pytest.mark.parametrize("mode", GenerationMode)
def test_every_answer_is_one_that_the_document_tells_of(document, mode):
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 12
    for operation in operations:
        if mode is GenerationMode.POSITIVE or operation.body:
            conforms(operation, mode)


def test_a_wrong_answer_would_be_noticed(document):
    """Of a document that promises something else."""
    raw = document.raw_schema
    raw["paths"]["/health"]["get"]["responses"]["200"]["content"]["application/json"]["schema"] = {"type": "array"}
    case = schemathesis.openapi.from_dict(raw)["/health"]["GET"].Case()
    with pytest.raises(schemathesis.core.failures.FailureGroup):
        case.call_and_validate(base_url=document.get_base_url(), checks=CHECKS)


def test_every_route_has_its_errors_in_the_form_of_its_dialect(document):
    for path, operations in document.raw_schema["paths"].items():
        for operation in operations.values():
            error = operation["responses"]["400"]["content"]["application/json"]["schema"]["properties"]
            assert ("request_id" in error) == path.startswith("/v1/messages")
