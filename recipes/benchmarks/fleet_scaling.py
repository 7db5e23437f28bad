"""Scale a fleet under load: one replica, two, and one again, with every request answered as it would be alone.

`llmc serve --ray` starts a cluster of its own, with one replica to two. One client asks for a while; then as many as
make the second replica worth its while, until it is there and for a while longer; then one again, until the second one
has gone. All requests are greedy chats of a few prompts, some streamed.

* Scaling: the replicas that the front's metrics tell of, each second; seconds from the change of the load to theirs.
* Answers: status 200, streams to their end, and for each prompt the same text from first to last.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx

TARGET = 1.5  # requests for each replica: one client is less than that, and MANY are more than that of one
MANY = 6
UP_S, DOWN_S = 3.0, 10.0  # that the load must last
WAIT_S = 300.0  # for what takes seconds, on a machine that does much else
SHOWN = 5  # mistakes that are described
CHAT = "/v1/chat/completions"
REPLICA = re.compile(r'^llmc_model_state{.*replica="(\w+)".*state="ready"} 1\.0$', re.M)


def replicas_in(metrics: str) -> int:
    """Replicas that have their model, by the front's metrics."""
    return len(set(REPLICA.findall(metrics)))


@dataclass
class Answers:
    """All that clients were answered.

    Attributes:
        texts: by prompt; more than one means that some are wrong.
        mistakes: everything that is no whole answer.
        count: whole answers.
    """

    texts: dict[int, set[str]] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    count: int = 0

    def take(self, prompt: int, status: int, body: str) -> None:
        """Note the answer to a prompt, a stream or a whole one."""
        if status != 200:
            self.mistakes.append(f"{status}: {body[:200]}")
        elif body.startswith("{"):
            self._note(prompt, json.loads(body)["choices"][0]["message"]["content"])
        elif not body.endswith("data: [DONE]\n\n"):
            self.mistakes.append(f"cut short: {body[-200:]}")
        else:
            pieces = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
            deltas = [choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"]]
            self._note(prompt, "".join(deltas))

    def _note(self, prompt: int, text: str) -> None:
        self.count += 1
        self.texts.setdefault(prompt, set()).add(text)

    @property
    def wrong(self) -> int:
        """Prompts that were answered in two ways."""
        return sum(len(texts) > 1 for texts in self.texts.values())


def ask(url: str, client: int, answers: Answers, stop: threading.Event) -> None:
    """Ask again and again; every second time for a stream."""
    with httpx.Client(base_url=url, timeout=WAIT_S) as http:
        for turn in range(1 << 30):
            if stop.is_set():
                return
            messages = [{"role": "user", "content": f"client {client}: " + f"{client} and {client * 7} " * 20}]
            body = {"messages": messages, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
            try:
                answer = http.post(CHAT, json={**body, "stream": turn % 2 == 1})
                answers.take(client, answer.status_code, answer.text)
            except (httpx.TransportError, ValueError, KeyError) as error:
                answers.mistakes.append(f"{type(error).__name__}: {error}")


@contextmanager
def load(url: str, clients: int, answers: Answers) -> Iterator[None]:
    """So many clients for as long as the block lasts."""
    stop = threading.Event()
    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(ask, url, client, answers, stop) for client in range(clients)]
        try:
            yield
        finally:
            stop.set()
    for one in running:
        one.result()


@contextmanager
def fleet(bundle: Path) -> Iterator[str]:
    """`llmc serve --ray` with one replica to two; its address."""
    scaling = [f"--ray-target-requests={TARGET}", f"--ray-scale-up-s={UP_S}", f"--ray-scale-down-s={DOWN_S}"]
    size = ["--ray-min-replicas=1", "--ray-max-replicas=2", "--ray-cpus=0.5", "--threads=1"]
    own = ["--port=0", "--determinism=batch"]  # answers that depend on no company
    command = [sys.executable, "-m", "llmc.cli", "serve", "--ray", *own, *size, *scaling, f"small={bundle}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            address = ""
            for line in process.stderr:
                lines.append(line)
                found = json.loads(line) if line.startswith("{") else {}
                address = found.get("address", address)
                if found.get("message") == "ready":
                    break
            else:
                raise SystemExit("the fleet did not start:\n" + "".join(lines[-SHOWN:]))
            reading = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
            reading.start()
            yield address
        finally:
            process.terminate()
            process.wait(WAIT_S)
    if process.returncode:
        raise SystemExit(f"the fleet ended with {process.returncode}:\n" + "".join(lines[-SHOWN:]))


def measure(url: str, seconds: float, seen: Callable[[float, int], None]) -> tuple[Answers, dict[str, float]]:
    """One client, many, one; seconds from each change of the load to the replicas that it makes."""
    answers, took, start = Answers(), {}, time.monotonic()

    def replicas() -> int:
        found = replicas_in(httpx.get(f"{url}/metrics", timeout=WAIT_S).text)
        seen(time.monotonic() - start, found)
        return found

    def watch(name: str, wanted: int) -> None:
        begun = time.monotonic()
        while replicas() != wanted:
            if time.monotonic() - begun > WAIT_S:
                raise SystemExit(f"{name}: {wanted} replicas were expected within {WAIT_S:g} s, and are not there")
            time.sleep(1)
        took[name] = time.monotonic() - begun
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            replicas()
            time.sleep(1)

    for name, clients, wanted in (("alone", 1, 1), ("up", MANY, 2), ("down", 1, 1)):
        with load(url, clients, answers):
            watch(name, wanted)
    return answers, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which each load goes on")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    timeline: list[tuple[float, int]] = []

    def seen(at: float, count: int) -> None:
        if not timeline or timeline[-1][1] != count:
            timeline.append((round(at, 1), count))
            print(f"{at:7.1f} s: {count} replicas", flush=True)

    with fleet(arguments.bundle) as url:
        answers, took = measure(url, arguments.seconds, seen)
    for mistake in answers.mistakes[:SHOWN]:
        print(mistake)
    found = {
        "replicas": timeline,
        "up_s": round(took["up"], 1),
        "down_s": round(took["down"], 1),
        "answers": answers.count,
        "failed": len(answers.mistakes),
        "wrong": answers.wrong,
    }
    print(json.dumps(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    counts = [count for _, count in timeline]
    raise SystemExit(0 if counts == [1, 2, 1] and not answers.mistakes and not answers.wrong else 1)


if __name__ == "__main__":
    main()
