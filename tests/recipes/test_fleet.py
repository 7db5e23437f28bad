"""Recipes for Kubernetes and KServe: manifests that say what they must."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from llmc.cli.serve import serve_command

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

    def test_has_a_head_and_workers_with_bounds_probes_and_no_root(self, service):
        cluster = service["rayClusterConfig"]
        head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
        for group in (head, workers):
            (container,) = group["template"]["spec"]["containers"]
            check_pod(group["template"]["spec"], container)
        assert {"readinessProbe", "livenessProbe"} <= container.keys()
        assert cluster["enableInTreeAutoscaling"] is True
        assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]

    def test_is_what_ray_reads_and_names_what_it_deploys(self, service, tiny_bundle):
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
    def test_runs_the_container_with_settings_that_llmc_has(self):
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
        assert container["imagePullPolicy"] == "IfNotPresent"
        assert {"name": "PORT", "value": str(given["port"])} in container["env"]
        assert container["readinessProbe"]["exec"]["command"][1:] == ["/etc/llmc/health.py", "/ready"]


class TestDeployment:
    def test_runs_the_container_with_settings_that_llmc_has(self):
        text = (RECIPES / "k3s" / "llmc.yaml").read_text(encoding="utf-8")
        claim, deployment, service = yaml.safe_load_all(text)
        pod = deployment["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        check_pod(pod["spec"], container)
        with serve_command.make_context("serve", list(container["args"])) as context:
            given = {name: value for name, value in context.params.items() if value not in (None, ())}
        (port,) = container["ports"]
        assert given["bundles"] == ("default=/bundles/default",) and port["containerPort"] == given["port"]
        assert container["imagePullPolicy"] == "IfNotPresent"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["exec"]["command"][1] == "/etc/llmc/health.py"
        assert service["spec"]["ports"][0]["targetPort"] == port["name"]
        labels = deployment["spec"]["selector"]["matchLabels"]
        assert service["spec"]["selector"] == labels == pod["metadata"]["labels"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["bundles"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
