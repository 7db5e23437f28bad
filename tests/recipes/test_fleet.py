"""Recipes for Kubernetes, KServe and Triton: manifests that say what they must, and a model that runs."""

import asyncio
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doubles import triton
from doubles.triton import InferenceRequest

from llmc.cli.serve import serve_command
from llmc.runtime import load

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

RECIPES = Path(__file__).parents[2] / "recipes" / "serve"


def manifest(name: str) -> dict[str, Any]:
    found = yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def check_container(container: dict[str, Any]) -> None:
    assert container["image"] and container["resources"]["requests"] and container["resources"]["limits"]["memory"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def check_pod(pod: dict[str, Any], container: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert pod["securityContext"]["runAsNonRoot"] is True
    check_container(container)


class TestRayService:
    """The fields that matter, by hand: the schema of KubeRay has a million characters."""

    @pytest.fixture
    def service(self) -> dict[str, Any]:
        found = manifest("ray/rayservice.yaml")
        assert (found["apiVersion"], found["kind"], found["metadata"]["name"]) == ("ray.io/v1", "RayService", "llmc")
        spec: dict[str, Any] = found["spec"]
        return spec

    @pytest.fixture
    def application(self, service: dict[str, Any]) -> dict[str, Any]:
        (found,) = yaml.safe_load(service["serveConfigV2"])["applications"]
        return dict(found)

    def test_has_a_head_and_workers_with_bounds_probes_and_no_root(self, service: dict[str, Any]) -> None:
        cluster = service["rayClusterConfig"]
        head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
        for group in (head, workers):
            (container,) = group["template"]["spec"]["containers"]
            check_pod(group["template"]["spec"], container)
        assert {"readinessProbe", "livenessProbe"} <= container.keys()
        assert cluster["enableInTreeAutoscaling"] is True
        assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]

    def test_is_what_ray_reads_and_names_what_it_deploys(self, service: dict[str, Any], tiny_bundle: Path) -> None:
        schema = pytest.importorskip("ray.serve.schema", reason="needs Ray Serve")
        deploy = schema.ServeDeploySchema.model_validate(yaml.safe_load(service["serveConfigV2"]))
        (application,) = deploy.applications
        module, _, name = application.import_path.partition(":")
        build = getattr(importlib.import_module(module), name)
        args = {**application.args, "models": {"tiny": str(tiny_bundle)}}
        assert build(args)._bound_deployment.name == "front"
        updates = {one.name: one.user_config for one in application.deployments}
        assert updates["replicas"]["models"] == application.args["models"] and "front" in updates
        tag = re.search(r"FROM rayproject/ray:([\d.]+)-", (RECIPES / "ray" / "Containerfile").read_text())
        assert tag is not None and tag[1] == service["rayClusterConfig"]["rayVersion"]


class TestInferenceService:
    def test_runs_the_container_with_settings_that_llmc_has(self) -> None:
        found = manifest("kserve/inferenceservice.yaml")
        assert (found["apiVersion"], found["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
        predictor = found["spec"]["predictor"]
        (container,) = predictor["containers"]
        assert container["name"] == "kserve-container"  # the one that KServe sends requests to
        check_pod(predictor, container)
        with serve_command.make_context("serve", list(container["args"])) as context:
            given = {name: value for name, value in context.params.items() if value not in (None, ())}
        (port,) = container["ports"]
        assert port == {"name": "http1", "containerPort": given["port"], "protocol": "TCP"}
        assert given["bundles"] == ("tiny=/mnt/models",) and given["host"] == "0.0.0.0"
        compile(container["readinessProbe"]["exec"]["command"][2], "probe", "exec")


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Iterator[Any]:
    """Triton's model, as Triton starts it: with the configuration as JSON."""
    module = _module()
    config = {"parameters": {"bundle": {"string_value": str(tiny_bundle)}, "load": {"string_value": '{"threads": 1}'}}}
    found = module.TritonPythonModel()
    found.initialize({"model_config": json.dumps(config)})
    yield found
    found.finalize()


def _module() -> ModuleType:
    path = RECIPES / "triton" / "llmc" / "1" / "model.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", triton)
        spec = importlib.util.spec_from_file_location("triton_model", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def ask(model: Any, *requests: InferenceRequest) -> list[list[triton.InferenceResponse]]:
    assert asyncio.run(model.execute(list(requests))) is None
    assert all(request.sender.final for request in requests)
    return [request.sender.responses for request in requests]


PROMPT = "def f(x):"
SAMPLING = {"max_tokens": 12, "temperature": 0}


class TestTriton:
    @pytest.fixture
    def expected(self, tiny_bundle: Path) -> str:
        with load(tiny_bundle, threads=1) as loaded:
            return loaded.generate(PROMPT, **SAMPLING).text

    def test_streams_and_whole_answers_have_the_text_of_the_model(self, model: Any, expected: str) -> None:
        given = {"text_input": PROMPT, "sampling_parameters": json.dumps(SAMPLING)}
        whole, pieces = ask(model, InferenceRequest(**given), InferenceRequest(**given, stream=True))
        assert [one.text("text_output") for one in whole] == [expected]
        assert len(pieces) > 3 and "".join(one.text("text_output") for one in pieces) == expected
        assert [one.text("finish_reason") for one in pieces] == [""] * (len(pieces) - 1) + ["length"]

    def test_a_cancelled_request_stops(self, model: Any) -> None:
        sampling = json.dumps({"max_tokens": 400, "ignore_eos": True})
        request = InferenceRequest(text_input=PROMPT, sampling_parameters=sampling, stream=True, cancel_after=2)
        (answers,) = ask(model, request)
        assert answers[-1].error is not None and answers[-1].error.code == "CANCELLED"
        assert len(answers) == 3
