"""Values beyond float16 fail a build for a GPU, though ONNX Runtime on the CPU computes right past them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.errors import BuildError
from llmc.export import export
from llmc.optimize.build import BuildReport, build
from llmc.optimize.judge import overflow
from llmc.optimize.recipe import BuildRequest, Request
from llmc.optimize.recipe.engine import EngineRequest

SMALL = {"max_context": 64, "max_batch": 2}
# The outputs of up_proj are about 2 before they are scaled, and 65,504 is the largest float16.
FACTOR = 1e4


@pytest.fixture(scope="module")
def scaled(exported: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a checkpoint that computes what another one does, but for up_proj, by 10,000 larger."""
    folder = tmp_path_factory.mktemp("scaled")
    checkpoint = Path(shutil.copytree(exported("llama-biases").checkpoint, folder / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    for name in tensors:
        if ".up_proj." in name:
            tensors[name] = tensors[name] * np.float32(FACTOR)
        elif name.endswith(".down_proj.weight"):
            tensors[name] = tensors[name] / np.float32(FACTOR)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    return export(checkpoint, folder / "export").output


def make(source: Path, output: Path, target: str, **recipe: Any) -> BuildReport:
    engine = None if target == "cuda" else EngineRequest(deferred=True)
    return build(BuildRequest(source, output, target=target, recipe=Request(**recipe), engine=engine, **SMALL))


@pytest.mark.parametrize(
    ("target", "precision", "remedy"),
    [
        ("tensorrt", "fp16", "build with --bf16 or --fp32"),
        ("tensorrt", "int8", "or for integers with compute = 'bfloat16' in the recipe"),
        ("cuda", "fp16", "build with --fp32, or for TensorRT with --bf16"),
    ],
)
def test_a_model_whose_values_leave_float16_is_refused_by_the_names_of_its_nodes(
    scaled, tmp_path, target, precision, remedy
):
    with pytest.raises(BuildError, match=r"float16 overflows in \d+ values of this model, beginning with ") as refused:
        make(scaled, tmp_path / "out" / "bundle", target, precision=precision)
    assert "model.layers.0.mlp." in str(refused.value)
    assert remedy in str(refused.value)
    assert list(tmp_path.iterdir()) == [], "nothing is published"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the values that ONNX Runtime is asked for."""
    names: list[str] = []
    open_part = overflow.open_part

    class Session:
        def __init__(self, *arguments: Any) -> None:
            self.session = open_part(*arguments)

        def run(self, outputs: list[str], feeds: dict[str, Any]) -> Any:
            names.extend(outputs)
            return self.session.run(outputs, feeds)

    monkeypatch.setattr(overflow, "open_part", Session)
    return names


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_every_products_result_is_looked_at_and_no_weight(exported, tmp_path, asked, precision):
    make(exported("llama-biases").export, tmp_path / "bundle", "tensorrt", precision=precision)
    for part in ("self_attn", "o_proj", "up_proj", "down_proj"):
        assert any(name.startswith("model.layers.1.") and part in name for name in asked), part
    assert not [name for name in asked if ".weight." in name], "those of a whole model would not fit in memory"
