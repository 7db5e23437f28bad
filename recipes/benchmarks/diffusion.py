"""Speed of a diffusion model by the tokens that a call fills, beside an autoregressive model of the same geometry.

Weights are random, so the number of steps sets how many tokens a call fills; of a trained model its threshold does. The
last column says from how many on it is the faster one. Rounds take turns, and the best of them counts. The time is the
processor's with one thread, and with more the clock's, on a machine where nothing else runs.
"""

import argparse
import time
from typing import Any

from llmc.runtime import Model, load
from llmc.runtime.bench.benchmark import draw_prompt

FILLED = (1, 2, 4, 8, 32)


def time_answer(model: Model, prompt: int, new: int, requests: int = 1, **options: Any) -> float:
    """Seconds from prompts of so many tokens to so many new ones after each, the prompts' own included, by request."""
    clock = time.process_time if model.threads == 1 else time.perf_counter
    prompts = [draw_prompt(model.manifest.geometry.vocab_size, prompt, 0, i) for i in range(requests)]
    start = clock()
    handles = [model.stream(it, max_tokens=new, temperature=0, ignore_eos=True, **options) for it in prompts]
    for handle in handles:
        handle.result()
    return (clock() - start) / requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("autoregressive", help="bundle")
    parser.add_argument("diffusion", help="bundle")
    for name, default in (("prompt", 128), ("new", 128), ("rounds", 3), ("threads", 1), ("requests", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    cases: dict[str, dict[str, Any]] = {f"{n} a call": {"diffusion_steps": args.new // n} for n in FILLED}
    cases |= {f"threshold {value}": {"confidence_threshold": value} for value in (0.9, 1.0)}
    cases |= {
        f"4 a call, {cache}": {"diffusion_steps": args.new // 4, "block_cache": cache} for cache in ("renewed", "off")
    }
    together = {"requests": args.requests}
    cases |= {f"{n} a call, {args.requests} requests": {**cases[f"{n} a call"], **together} for n in (4, 8)}
    options = {"threads": args.threads, "self_test": False, "prefix_cache_bytes": 0}
    with load(args.autoregressive, **options) as plain, load(args.diffusion, **options) as model:
        plain_s, many_s, best = float("inf"), float("inf"), dict.fromkeys(cases, float("inf"))
        for _ in range(args.rounds):
            plain_s = min(plain_s, time_answer(plain, args.prompt, args.new))
            many_s = min(many_s, time_answer(plain, args.prompt, args.new, args.requests))
            for name, asked in cases.items():
                best[name] = min(best[name], time_answer(model, args.prompt, args.new, **asked))
    many = f"{args.new / many_s:.1f} of {args.requests} requests at once"
    print(f"autoregressive: {args.new / plain_s:.1f} tokens per second, {many}")
    for name, seconds in best.items():
        print(f"{name}: {args.new / seconds:.1f}, {plain_s / seconds:.2f} times as many")


if __name__ == "__main__":
    main()
