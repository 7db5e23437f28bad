"""Clients of a server with OpenAI's API: each sends its next request after its last answer. service.py starts them.

python clients.py http://127.0.0.1:8000 --concurrency 8 --requests 96    # the figures as JSON
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from machine import positive

TIMEOUT_S = 540.0  # of one request
FIELDS = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0}
PROBES = (64, 128)  # words of the prompts that reveal how a server counts tokens
QUANTILES = (50, 90, 95, 99)
# Short and frequent, so that nearly every vocabulary has each as one token.
_FREQUENT = """
the of and to in is you that it was for on are as with they at be this have from or one had by but not all were
we when your can said there use an each which do how their if will up other about out many then them these so
some would make like into time has look two more go see number no way could people my than first water been call
who its now find long down day did get come made may part over new sound take only little work know place year
live me back give most very after thing our just name good sentence man think say great where help through much
"""
WORDS = _FREQUENT.split()


@dataclass(eq=False)
class Exchange:
    """A request as its client sees it: when it was sent, when each piece of output came, and the server's counts."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0


def ask(connection: HTTPConnection, prompt: str, max_tokens: int) -> Exchange:
    """Send one request and time its stream. Raises SystemExit: there is no answer, or it is incomplete."""
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({**FIELDS, "messages": messages, "max_tokens": max_tokens})
    exchange, finished = Exchange(time.perf_counter()), False
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status}: {response.read(300).decode(errors='replace')}")
    for line in response:
        moment = time.perf_counter()
        if not line.startswith(b"data:"):
            continue
        if finished := line[5:].strip() == b"[DONE]":
            continue  # read the body to its end, so that the connection can be used again
        chunk = json.loads(line[5:])
        if "error" in chunk:
            raise SystemExit(f"the stream ended with an error: {chunk['error']}")
        if usage := chunk.get("usage"):
            exchange.prompt_tokens, exchange.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        deltas = (choice.get("delta") or {} for choice in chunk.get("choices") or ())
        if any(value for delta in deltas for name, value in delta.items() if name != "role"):
            exchange.pieces.append(moment)
    if not finished or not exchange.tokens:
        raise SystemExit("the stream ended without [DONE], or without counts of tokens")
    return exchange


def make_prompts(count: Callable[[str], int], tokens: int, number: int, seed: int) -> list[str]:
    """Make different prompts of random words; ``count`` returns the tokens of a prompt with its chat template."""
    draw = np.random.default_rng(seed)
    few, many = (count(" ".join(draw.choice(WORDS, words))) for words in PROBES)
    per_word = (many - few) / (PROBES[1] - PROBES[0])
    words = max(1, round(PROBES[0] + (tokens - few) / per_word))
    return [" ".join(draw.choice(WORDS, words)) for _ in range(number)]


def closed_loop(ask_one: Callable[[str], Exchange], prompts: Iterable[str], concurrency: int) -> dict[str, Any]:
    """Ask from ``concurrency`` threads, each after its last answer, and compute the figures."""
    with ThreadPoolExecutor(concurrency) as pool:
        return figures(list(pool.map(ask_one, prompts)))


def figures(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Compute tokens per second, and distributions of counts and of latencies in seconds.

    TTFT is the time from sending to the first piece of output, TPOT that from the first to the last piece over the
    tokens after the first.
    """
    if not all(each.pieces for each in exchanges):
        raise SystemExit("an answer had no text, so there is no time of its first piece")
    seconds = max(each.pieces[-1] for each in exchanges) - min(each.sent for each in exchanges)
    return {
        "completed": len(exchanges),
        "output_tokens_per_s": sum(each.tokens for each in exchanges) / seconds,
        "prompt_tokens": distribution(each.prompt_tokens for each in exchanges),
        "output_tokens": distribution(each.tokens for each in exchanges),
        "ttft": distribution(each.pieces[0] - each.sent for each in exchanges),
        "tpot": distribution((each.pieces[-1] - each.pieces[0]) / max(1, each.tokens - 1) for each in exchanges),
    }


def distribution(values: Iterable[float]) -> dict[str, float]:
    known = list(values)
    quantiles = {f"p{q}": float(value) for q, value in zip(QUANTILES, np.percentile(known, QUANTILES), strict=True)}
    return {"mean": float(np.mean(known)), **quantiles, "max": float(max(known))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a server on plain HTTP, without a path")
    parser.add_argument("--concurrency", type=positive, default=1)
    parser.add_argument("--requests", type=positive, default=64, help="of all clients together")
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with ExitStack() as connections:
        idle: SimpleQueue[HTTPConnection] = SimpleQueue()
        for _ in range(args.concurrency):
            idle.put(connections.enter_context(closing(HTTPConnection(urlsplit(args.url).netloc, timeout=TIMEOUT_S))))

        def send(max_tokens: int, prompt: str) -> Exchange:
            connection = idle.get()
            try:
                return ask(connection, prompt, max_tokens)
            finally:
                idle.put(connection)

        prompts = make_prompts(lambda text: send(1, text).prompt_tokens, args.prompt, args.requests, args.seed)
        print(json.dumps(closed_loop(partial(send, args.new_tokens), prompts, args.concurrency)))


if __name__ == "__main__":
    main()
