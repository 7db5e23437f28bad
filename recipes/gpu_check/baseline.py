"""The alternative to llmc: transformers on the GPU, decoding compiled on a static cache, prefill by torch's SDPA."""

import statistics
from pathlib import Path
from typing import Any

from gpu_check import models
from gpu_check.measure import ROUNDS, seconds_of
from gpu_check.steps import NotHereError

PROMPT, PREFILL, NEW_TOKENS = 128, 2048, 128
# Compiled calls before timing: the first compiles, the second records the CUDA graph, the third replays it.
WARM_UP = 4
FASTEST = {"mode": "reduce-overhead"}  # of torch's own compiler


def baseline(geometry: str, work: Path) -> dict[str, Any]:
    """Seconds of a decode step and of a prefill of 2,048 tokens, both in float16, medians of some rounds.

    Speeds do not depend on the weights, so the model is made from its config alone.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise NotHereError(f"torch and transformers are needed: {error}") from error
    if not torch.cuda.is_available():
        raise NotHereError(f"torch {torch.__version__} sees no GPU")
    config = transformers.AutoConfig.from_pretrained(models.export(geometry, work))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation="sdpa")
    context, model = config.max_position_embeddings, model.eval()
    with torch.no_grad():
        return {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "prefill_tokens": min(PREFILL, context),
            "prefill_s": prefill(model, min(PREFILL, context)),
            "step_s": decode(model, min(PROMPT, context // 2), min(NEW_TOKENS, context // 4), FASTEST),
        }


def prefill(model: Any, length: int) -> float:
    """Median seconds to the logits after the last token, the keys and values kept."""
    import torch

    ids = torch.randint(10, 1000, (1, length), device=model.device)

    def run() -> None:
        model(ids, use_cache=True, logits_to_keep=1)
        wait(model)

    run()
    return statistics.median(seconds_of(run) for _ in range(ROUNDS))


def decode(model: Any, length: int, new_tokens: int, compiler: dict[str, str]) -> float:
    """Median seconds of a greedy step, compiled in whole, on a static cache after a prompt of ``length``; the steps of
    a round follow each other without waiting for the host."""
    import torch
    from transformers import StaticCache

    def step(token: Any, position: Any, cache: Any) -> Any:
        found = model(token, position_ids=position, past_key_values=cache, use_cache=True)
        return found.logits[:, -1:].argmax(dim=-1)

    compiled = torch.compile(step, fullgraph=True, **compiler)
    ids = torch.randint(10, 1000, (1, length), device=model.device)
    token, position = ids[:, -1:].clone(), torch.zeros((1, 1), dtype=torch.long, device=model.device)
    cache = StaticCache(config=model.config, max_cache_len=length + new_tokens + WARM_UP)

    def advance(count: int) -> None:
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            token.copy_(compiled(token, position, cache))
            position.add_(1)
        wait(model)

    seconds = []
    for _ in range(ROUNDS):
        cache.reset()
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        position.fill_(length)
        advance(WARM_UP)
        seconds.append(seconds_of(lambda: advance(new_tokens)) / new_tokens)
    return statistics.median(seconds)


def wait(model: Any) -> None:
    """Until the GPU has done what was asked."""
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()
