"""The CUDA session on ONNX Runtime's real CUDA provider and NVIDIA's real bindings, in a child on a stub of CUDA."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doubles.null_cuda import environment

ROOT = Path(__file__).parents[4]
LIBRARY = ROOT / "build" / "gpu-library"
TESTS = Path(__file__).with_name("real_provider.py")
TINY = ROOT / "recipes" / "tiny" / "checkpoint"


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """A folder of bundles: a layer with biases and four heads of queries to one of keys, in each precision."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from llmc.export import export
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest, Request

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint")
    AutoModelForCausalLM.from_config(config).half().save_pretrained(checkpoint)
    export(checkpoint, tmp_path / "export")
    for precision in ("fp16", "int8", "int4"):
        recipe = Request(scheme="rtn") if precision == "int4" else None
        output = tmp_path / "bundles" / precision
        build(
            BuildRequest(
                tmp_path / "export",
                output,
                target="cuda",
                precision=precision,
                max_context=1024,
                max_batch=2,
                recipe=recipe,
            )
        )
    return tmp_path / "bundles"


@pytest.mark.skipif(not (LIBRARY / "onnxruntime").exists(), reason="onnxruntime-gpu is not here: make gpu-library")
def test_the_real_provider_opens_places_chooses_records_and_fails_as_the_session_expects(null_cuda, bundles):
    settings = environment(null_cuda, LIBRARY, BUNDLES=str(bundles))
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    child = subprocess.run(tests, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stdout[-6000:]
    assert "skipped" not in child.stdout
