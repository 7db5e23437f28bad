"""Everything that llmc is for is there: each row of its mission, with a part of the code that would be gone with it.

Missing so far: a paged KV cache (issue 43).
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from fastapi.routing import APIRoute

from llmc.cli.main import cli
from llmc.optimize.targets import TARGETS
from llmc.runtime.sampling.params import PARAMETERS

# Row -> proofs, each a kind of :data:`FINDERS` and what it finds.
PIPELINE = {
    "export to ONNX": ("option export --output", "module llmc.export.graph"),
    "explicit KV-cache I/O": (
        "object llmc.bundle:GRAPH_CONTRACT_VERSION",
        "object llmc.bundle.model.geometry:Geometry.caches",
    ),
    "int8 quantization": ("option build --int8", "object llmc.optimize.quantize.rtn:quantize"),
    "int4 quantization": ("option build --int4", "page recipes/int4.toml"),
    "GPTQ": ("module llmc.optimize.quantize.gptq", "object llmc.optimize.recipe:Request.scheme"),
    "pruning": ("object llmc.optimize.recipe:Request.sparsity", "module llmc.optimize.quantize.pruning"),
    "distillation": ("page recipes/distill.py", "option run --draft"),
    "TensorRT": ("target tensorrt", "target tensorrt-rtx", "module llmc.runtime.sessions.tensorrt.session"),
    "ONNX Runtime CUDA": ("target cuda", "module llmc.runtime.sessions.onnxruntime.cuda"),
    "CPU": ("target cpu", "module llmc.runtime.sessions.onnxruntime.cpu"),
}
DECODING = {
    "greedy": ("parameter temperature=0",),
    "temperature": ("parameter temperature=0.7", "option run --temperature"),
    "top-k": ("parameter top_k=40", "step top_k"),
    "top-p": ("parameter top_p=0.9", "step top_p"),
    "min-p": ("parameter min_p=0.1", "step min_p"),
    "locally typical": ("parameter typical_p=0.5", "step typical_p", "option run --typical-p"),
    "Mirostat 1": ("parameter mirostat=1", "step mirostat", "option run --mirostat"),
    "Mirostat 2": ("parameter mirostat=2", "parameter mirostat_tau=5.0", "parameter mirostat_eta=0.1"),
    "beam search": ("parameter num_beams=4", "object llmc.runtime.search.beam:BeamSearch"),
    "re-ranking of hypotheses": ("parameter length_penalty=0.5", "parameter num_return_sequences=2"),
    "re-ranking of samples": ("parameter best_of=8",),
    "consensus (minimum Bayes risk)": ("parameter consensus=chrf", "object llmc.runtime.search.consensus:SIMILARITIES"),
    "presence penalty": ("parameter presence_penalty=0.5", "step frequency_penalty"),
    "frequency penalty": ("parameter frequency_penalty=0.5", "step frequency_penalty"),
    "repetition penalty": ("parameter repetition_penalty=1.1", "step repetition_penalty"),
    "stop strings": ("parameter stop", "option run --stop"),
    "stop tokens": ("parameter stop_token_ids",),
    "end of sequence": ("parameter ignore_eos", "object llmc.bundle:Generation.eos_token_ids"),
    "length limits": ("parameter max_tokens=1", "parameter min_tokens=1"),
    "seeds": ("parameter seed=1",),
}
RUNTIME = {
    "tokenization": ("object llmc.runtime.text.tokenizer:Tokenizer.encode",),
    "detokenization": ("object llmc.runtime.text.detokenizer:TextStream.push",),
    "chat templates": ("object llmc.runtime.text.chat_template:ChatTemplate.render", "option run --chat"),
    "prefill and decode": (
        "object llmc.runtime.sessions:Phase.PREFILL",
        "object llmc.runtime.sessions:Phase.DECODE",
        "object llmc.runtime.engine.scheduler:ChunkedPrefill",
    ),
    "KV cache of grouped and multi-query attention": ("object llmc.bundle.model.attention:Attention.kv_heads",),
    "prefix cache across requests": (
        "object llmc.runtime.kv.prefix_cache:PrefixCache",
        "option serve --prefix-cache-bytes",
    ),
    "continuous batching": ("object llmc.runtime.engine.scheduler:Scheduler", "option serve --max-batch"),
    "streaming by SSE": ("object llmc.runtime.server.http.streams:EventStream", "route POST /v1/chat/completions"),
    "streaming by WebSocket": ("object llmc.runtime.server.dialects.socket:Sockets",),
    "speculative decoding": ("object llmc.runtime.speculation.speculator:verify", "option serve --draft"),
    "fused attention": (
        "object llmc.optimize.lower.onnxruntime.attention:group_query_attention",
        "object llmc.optimize.lower.tensorrt.native:lower_attention",
    ),
    "context-length policy": ("parameter on_overflow=sink", "parameter on_overflow=truncate_left"),
    "TTFT": ("object llmc.runtime.observe.metrics:RequestMetrics.ttft_s", "route GET /metrics"),
    "TPOT": ("object llmc.runtime.observe.metrics:RequestMetrics.tpot_s",),
    "ITL": ("object llmc.runtime.observe.metrics:RequestMetrics.itl_p95_s",),
    "tokens per second": ("object llmc.runtime.api.results:Timings.decode_tokens_per_s", "option bench --new-tokens"),
    "end-to-end latency": ("object llmc.runtime.observe.metrics:RequestMetrics.e2e_s",),
}
SCALE = {
    "replicas on Ray": ("option serve --ray", "option serve --ray-min-replicas", "page recipes/serve/ray"),
    "pipeline over boxes": ("option build --stages", "object llmc.runtime.sessions.staged:StagedSession"),
    "tensor parallelism on paper": ("page recipes/larger_than_one_box.md#The arithmetic",),
    "hybrid of box and cloud": ("option serve --upstream", "object llmc.runtime.server.upstream:Upstream.answer"),
}
ALSO_NAMED = {
    "diffusion language models": ("family llada", "family dream", "parameter diffusion_steps=8"),
    "multimodal input": ("family qwen2_5_vl", "option run --image", "object llmc.runtime.vision.tower:Tower"),
    "speech": ("family qwen3_asr", "option run --audio", "object llmc.runtime.audio.tower:AudioTower"),
    "Jetson": ("page recipes/jetson.md#Install",),
    "edge services": ("page recipes/serve/llmc.service", "page recipes/arm.md", "option serve --unix-socket"),
    "energy": ("page recipes/jetson.md#Power",),
}
ROWS = {**PIPELINE, **DECODING, **RUNTIME, **SCALE, **ALSO_NAMED}
PROOFS = [(row, proof) for row, proofs in ROWS.items() for proof in proofs]


def find_object(root: Path, name: str) -> bool:
    """``module:attribute.attribute``; fields of dataclasses count without a default too."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    for part in path.split("."):
        if not hasattr(found, part):
            return part in getattr(found, "__dataclass_fields__", {})
        found = getattr(found, part)
    return True


def find_module(root: Path, name: str) -> bool:
    """A module, which is not imported: some bring torch or a GPU's libraries."""
    return importlib.util.find_spec(name) is not None


def find_parameter(root: Path, text: str) -> bool:
    """``name`` or ``name=value``, of a request, in the range that it states."""
    name, equals, value = text.partition("=")
    if name not in PARAMETERS or not equals:
        return name in PARAMETERS
    stated = PARAMETERS[name].range
    return any(stated.holds(read(value)) for read in (int, float, str) if _reads(read, value))


def _reads(read: Callable[[str], Any], value: str) -> bool:
    try:
        read(value)
    except ValueError:
        return False
    return True


def find_step(root: Path, name: str) -> bool:
    """A step between the model's logits and the draw."""
    from llmc.runtime.sampling.processors import CUTS, PROCESSORS

    return name in PROCESSORS or name in CUTS


def find_option(root: Path, text: str) -> bool:
    verb, option = text.split()
    command = cli.get_command(click.Context(cli), verb)
    return command is not None and any(option in each.opts for each in command.params)


def find_route(root: Path, text: str) -> bool:
    """``METHOD path``."""
    from llmc.runtime.server.app import ROUTERS

    method, path = text.split()
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    return any(route.path == path and method in route.methods for route in routes)


def find_page(root: Path, text: str) -> bool:
    """A file or folder, or a heading of a page."""
    path, _, heading = text.partition("#")
    place = root / path
    if not heading:
        return place.exists()
    return place.is_file() and re.search(f"^#+ {heading}$", place.read_text(encoding="utf-8"), re.M) is not None


def find_family(root: Path, name: str) -> bool:
    return find_module(root, f"llmc.export.families.{name}")


def find_target(root: Path, name: str) -> bool:
    return name in TARGETS


FINDERS: dict[str, Callable[[Path, str], bool]] = {
    "object": find_object,
    "module": find_module,
    "parameter": find_parameter,
    "step": find_step,
    "option": find_option,
    "route": find_route,
    "page": find_page,
    "family": find_family,
    "target": find_target,
}


def find(root: Path, proof: str) -> bool:
    kind, _, what = proof.partition(" ")
    return FINDERS[kind](root, what)


def test_every_row_of_the_mission_is_there(root):
    assert [f"{row}: {proof}" for row, proof in PROOFS if not find(root, proof)] == []


@pytest.mark.parametrize(
    "gone",
    [
        *("object llmc.runtime.sampling.mirostatt:Mirostat", "object llmc.runtime.sampling.mirostat:Mirostatt"),
        *("object llmc.bundle:Generation.nothing", "parameter miro=2", "parameter mirostat=3", "step miro"),
        *("option run --miro", "option runn --mirostat", "route GET /v1/nothing", "route GET /v1/chat/completions"),
        *("route PUT /v1/responses", "page recipes/jetsam.md", "page recipes/jetson.md#Powder"),
        *("family llama9", "target npu", "module llmc.export.grap"),
    ],
)
def test_a_row_that_is_gone_would_be_seen(root, gone):
    assert not find(root, gone)
