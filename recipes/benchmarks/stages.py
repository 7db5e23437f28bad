"""Measure concurrent requests on a model in stages, each in a separate process, over artificially slow links.

Groups of rows that take turns are compared with steps of all rows, alternating on one loaded model. A message arrives
after its latency plus its bytes divided by the link's rate; the processes go on meanwhile. Figures are new tokens of
all requests per second, including prompts, as medians over rounds. Needs the extra ``ray``.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
from machine import in_turns, positive, publish, ratio, table

from llmc.runtime import Generator, load
from llmc.runtime.bench.benchmark import draw_prompt
from llmc.runtime.host import huge_pages
from llmc.runtime.server.fleet import stages as on_ray
from llmc.runtime.sessions import Batch
from llmc.runtime.sessions.staged import unpack

# Latency in seconds, and seconds per byte.
LINKS = {"no link": (0.0, 0.0), "1 Gbit/s, 1 ms": (1e-3, 8e-9), "100 Mbit/s, 5 ms": (5e-3, 8e-8)}
Message = tuple[float, tuple[float, float], Any]  # time sent, link, content


def send(link: tuple[float, float], content: Any) -> Message:
    return time.time(), link, content


def receive(message: Message) -> Any:
    sent, (latency, for_byte), content = message
    size = sum(array.nbytes for array in content) if isinstance(content, tuple) else 0
    time.sleep(max(0.0, sent + latency + for_byte * size - time.time()))
    return content


class FarStage(on_ray.StageActor):
    """A stage at the end of a link, which also sends over the link."""

    def run(self, batch: Batch, hidden: Message) -> Message:
        return send(hidden[1], super().run(batch, receive(hidden)))


class FarStages(on_ray.StagesOnRay):
    """The stages before the last; ``link`` connects each with the next."""

    link = LINKS["no link"]

    def submit(self, batch: Batch) -> Any:
        self._wait()
        message: Any = send(self.link, None)
        for number in sorted(self._actors):
            message = self._actors[number].run.remote(batch, message)
        return message

    def fetch(self, promise: Any) -> Any:
        hidden = receive(self._get(promise))
        return hidden if self.exact else unpack(hidden)


def speed(model: Generator, args: argparse.Namespace, requests: int, number: int) -> float:
    """New tokens per second of ``requests`` that arrive together."""
    vocabulary = model.manifest.geometry.vocab_size
    prompts = [draw_prompt(vocabulary, args.prompt, number, i) for i in range(requests)]
    began = time.perf_counter()
    handles = [model.stream(prompt, max_tokens=args.new, temperature=0, ignore_eos=True) for prompt in prompts]
    for handle in handles:
        handle.result()
    return requests * args.new / (time.perf_counter() - began)


def compare(model: Generator, args: argparse.Namespace, link: str) -> Iterator[tuple[str, ...]]:
    """Rows of the table: requests, both speeds, and their ratio by round."""
    runner, FarStages.link = model.engine._runner, LINKS[link]
    turns = runner._ahead

    def time_way(way: Any, requests: int, number: int) -> float:
        model.engine.call(lambda: setattr(runner, "_ahead", way))
        return speed(model, args, requests, number)

    for requests in args.requests:
        ways = {name: partial(time_way, way, requests) for name, way in (("whole", None), ("turns", turns))}
        speeds = in_turns(ways, args.rounds)
        medians = (f"{statistics.median(speed_of_way):.1f}" for speed_of_way in speeds.values())
        yield link, str(requests), *medians, ratio(speeds["turns"], speeds["whole"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chain", type=Path, help="of `llmc build --stages`, with the folders of all stages")
    parser.add_argument("--whole", type=Path, help="the same model in one piece, to be timed first")
    for name, default in (("threads", 1), ("rounds", 3), ("prompt", 128), ("new", 48)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 4, 8])
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    on_ray.StageActor = FarStage
    ray.init("local", log_to_driver=False, include_dashboard=False, object_store_memory=200 << 20)
    options = {"threads": args.threads, "self_test": False, "prefix_cache_bytes": 0}
    rows: list[tuple[str, ...]] = []
    if args.whole:
        with load(args.whole, **options) as model:
            huge_pages.settle()
            for requests in args.requests:
                speeds_whole = [speed(model, args, requests, number) for number in range(args.rounds + 1)][1:]
                rows.append(("one process", str(requests), f"{statistics.median(speeds_whole):.1f}", "", ""))
    with load(args.chain, stages=FarStages, **options) as model:
        huge_pages.settle()
        for link in LINKS:
            rows += compare(model, args, link)
    ray.shutdown()
    head = ("", "requests", "steps in one piece", "groups that take turns", "gain")
    publish(args.json, None, [table(head, *rows)], rows=rows)  # Ray's own processes would pass for others


if __name__ == "__main__":
    main()
