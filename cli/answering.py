"""The options of ``llmc run`` and ``llmc chat``, and words about an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llmc.cli.options import ENGINE_NAMES, engine_option, take
from llmc.errors import UsageError

if TYPE_CHECKING:
    from llmc.runtime import GenerationResult

LOADING = ("threads", "max_context", "memory", "self_test", "verify", "emulate")
max_context_option = engine_option(
    "--max-context", type=int, help="Longest sequence in tokens.  [default: the bundle's]"
)
self_test_option = click.option(
    "--self-test/--no-self-test",
    default=None,
    help="Replay the bundle's golden prompts first.  [default: the first time on this machine]",
)
stats_option = click.option("--stats", is_flag=True, help="Print counts, times and the seed on stderr at the end.")


def collect_load_options(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`llmc.runtime.load`; those of the engine only where they were given."""
    return {name: options[name] for name in LOADING if name in options} | take(options, ENGINE_NAMES)


def refuse_unseen(sampling: dict[str, Any]) -> None:
    """Refuse what only JSON shows."""
    for name in ("logprobs", "prompt_logprobs", "detokenize"):
        if sampling.get(name, True) is not True:
            raise UsageError(f"{name} is {sampling[name]}, which only llmc run with --json shows; add it, or leave it")


def refuse_several(sampling: dict[str, Any]) -> None:
    """Refuse what gives a turn several answers."""
    if sampling.get("num_return_sequences", 1) > 1 or (sampling.get("n", 1) > 1 and "consensus" not in sampling):
        raise UsageError("--n or --num-return-sequences ask for several outputs, a turn has one; leave them out")


def is_one(sampling: dict[str, Any]) -> bool:
    """True if one output is generated, so that its text can be printed as it comes."""
    return all(sampling.get(name, 1) <= 1 for name in ("n", "best_of", "num_return_sequences"))


def describe(result: GenerationResult) -> str:
    """Counts, speeds, and why the request ended, in one line."""
    usage, timings, metrics = result.usage, result.timings, result.metrics
    cached = f" ({usage.cached_tokens} from the prefix cache)" if usage.cached_tokens else ""
    cut = f" ({usage.truncated_tokens} left out)" if usage.truncated_tokens else ""
    drafted = f"; {metrics.accepted} of {metrics.drafted} drafts accepted" if metrics.drafted else ""
    seed = "" if result.seed is None else f"; seed {result.seed}"
    return (
        f"prompt: {usage.prompt_tokens} tokens{cached}{cut}, first token after {timings.ttft_s:.3f} s "
        f"({timings.prefill_tokens_per_s:.1f} tok/s); completion: {usage.completion_tokens} tokens, "
        f"{timings.tpot_s * 1000:.2f} ms each ({timings.decode_tokens_per_s:.1f} tok/s){drafted}; "
        f"ended by {result.finish_reason}{seed}"
    )
