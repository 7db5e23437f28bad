"""Speed of every family beside llama's, at one size, on the CPU: what a family costs beyond its arithmetic.

    python families.py FOLDER [--precisions int8 int4] [--rounds 3] [--only gemma2 phi] [--threads 2]

Writes random bfloat16 checkpoints with the same number of weights into FOLDER, exports and builds them, and times each
bundle in every round. A bundle that is there is not built again. Speeds are tokens per second: on one thread of
processor time, which other work on the machine changes less than what a clock shows; on more threads, which wait for
each other, by the clock. Ratios are per weight that a token is multiplied with: tokens per second times weights, over
the same of llama in the same round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import count as count_from
from pathlib import Path
from typing import Any

from machine import Disturbance, in_turns, positive, publish, ratio, table
from make_model import write_checkpoint
from transformers import AutoConfig

from llmc.export import export
from llmc.export.config import linears
from llmc.export.families import FAMILIES, read_config
from llmc.export.keys import Keys
from llmc.optimize.build import build
from llmc.runtime import Model, load
from llmc.runtime.bench.benchmark import draw_prompt

LAYERS = 8  # enough that the head is a twentieth of the work
SIZE = {
    "hidden_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
}
STEP = 64  # inner widths are multiples of this: every scheme has whole blocks
WIDTHS = ("shared_intermediate_size", "intermediate_size", "n_inner")  # the first that a config has is the inner width
LLAMA_WIDTH = 3072
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
# What a family needs beside the size to be what is published.
ASKED: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    "granite": GRANITE,
    "granitemoehybrid": {
        **GRANITE,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["attention"] * LAYERS,
    },
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1e3}},
    "mistral": {"sliding_window": None},
    "phi": {"tie_word_embeddings": False},
    "stablelm": {"use_qkv_bias": True},
}
PHASES = ("prefill", "decode")
REPEATS = 10
SHORT = 16  # tokens of the prompts before decode


def geometry(family: str, weights: int | None) -> dict[str, Any]:
    """Keys of its config.json; the inner width gives about so many weights, or is llama's own."""
    kind = type(AutoConfig.for_model(family))
    known = {field.name for field in fields(kind)} | set(kind.attribute_map)
    keys = {
        "model_type": family,
        **{key: value for key, value in SIZE.items() if key in known},
        **ASKED.get(family, {}),
    }
    width = next(name for name in WIDTHS if name in known)
    if weights is None:
        return {**keys, width: LLAMA_WIDTH}
    least, more = (count({**keys, width: times * STEP}) for times in (1, 2))
    return {**keys, width: STEP * (1 + round((weights - least) / (more - least)))}


def count(keys: dict[str, Any]) -> int:
    """Number of weights that a token is multiplied with: those of all linears, the head's too."""
    config = AutoConfig.for_model(**{"tie_word_embeddings": True, **keys, "bos_token_id": 0, "eos_token_id": 2})
    return sum(linear.size for linear in linears(read_config(Keys(config.to_dict(), "config.json"))))


def is_text(family: str) -> bool:
    """False where the config has that of a text decoder inside, which is a family of its own."""
    return "text_config" not in type(AutoConfig.for_model(family)).sub_configs


def prepare(family: str, keys: dict[str, Any], precision: str, folder: Path) -> Path:
    """The bundle of a family in a precision, made if it is not there."""
    checkpoint, exported, bundle = (folder / family / name for name in ("checkpoint", "export", precision))
    if not checkpoint.exists():
        write_checkpoint(keys, checkpoint)
    if not exported.exists():
        export(checkpoint, exported)
    if not bundle.exists():
        build(exported, bundle, precision=precision, max_context=1024)
    return bundle


def rates(bundle: Path, length: int, new_tokens: int, threads: int) -> dict[str, float]:
    """Tokens per second: those of a prompt, and those generated after a short one.

    Each is the best of many short stretches, for other work disturbs a short one less often.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    with load(bundle, threads=threads, self_test=False) as model:
        vocabulary, numbers = model.manifest.geometry.vocab_size, count_from(0)

        def best(length: int, tokens: int, times: int) -> float:  # no two prompts alike: nothing is cached
            prompts = (draw_prompt(vocabulary, length, 0, next(numbers)) for _ in range(times))
            return min(seconds(model, prompt, tokens, clock) for prompt in prompts)

        best(length, 2, 1)  # the first calls allocate; they are not counted
        first, answer = best(SHORT, 1, 2 * REPEATS), best(SHORT, 1 + new_tokens, 2 * REPEATS)
        return {"prefill": length / best(length, 1, REPEATS), "decode": new_tokens / (answer - first)}


def seconds(model: Model, prompt: list[int], new_tokens: int, clock: Callable[[], float]) -> float:
    start = clock()
    model.generate(prompt, max_tokens=new_tokens, temperature=0, ignore_eos=True)
    return clock() - start


def rows(found: dict[str, list[dict[str, float]]], weights: dict[str, int]) -> list[tuple[str, ...]]:
    """Of each family its weights, and by phase its median rate and, per weight, its ratio to llama's rounds."""
    lines = []
    for family, rounds in found.items():
        scale, cells = weights[family] / weights["llama"], []
        for phase in PHASES:
            own, llama = ([rates[phase] for rates in each] for each in (rounds, found["llama"]))
            cells.append(f"{statistics.median(own):.0f} ({ratio([rate * scale for rate in own], llama)})")
        lines.append((f"`{family}`", f"{weights[family] / 1e6:.1f}", *cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precisions", nargs="+", default=["int8", "int4"])
    parser.add_argument("--only", nargs="+", choices=FAMILIES, help="these families, and llama")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--prompt", type=positive, default=128)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--new-tokens", type=positive, default=16)
    parser.add_argument("--json", type=Path, help="where to write every round")
    args = parser.parse_args()
    geometries = {"llama": geometry("llama", None)}
    goal = count(geometries["llama"])
    wanted = [family for family in args.only or FAMILIES if family != "llama" and is_text(family)]
    geometries |= {family: geometry(family, goal) for family in wanted}
    weights = {family: count(keys) for family, keys in geometries.items()}
    found, tables, disturbance = {}, [], Disturbance()
    for precision in args.precisions:
        bundles = {family: prepare(family, keys, precision, args.folder) for family, keys in geometries.items()}
        ways = {
            family: (lambda number, path=path: rates(path, args.prompt, args.new_tokens, args.threads))
            for family, path in bundles.items()
        }
        found[precision] = in_turns(ways, args.rounds)
        head = (precision, "10^6 weights", f"prefill {args.prompt}", "decode")
        tables.append(table(head, *rows(found[precision], weights)))
    publish(args.json, disturbance.cpus(), tables, weights=weights, rounds=found)


if __name__ == "__main__":
    main()
