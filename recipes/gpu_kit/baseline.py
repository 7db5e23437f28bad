"""The same geometries in torch, for comparison: a static cache, SDPA, a hand-made CUDA graph, and torch.compile."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import FAKE, expect, main, middle, report, timed

# hidden, layers, heads, kv heads, head width, intermediate, vocabulary, biases of q, k and v
GEOMETRIES = {"1b": (2048, 16, 32, 8, 64, 8192, 128_256, False), "0.5b": (896, 24, 14, 2, 64, 4864, 151_936, True)}
TINY = (64, 2, 4, 2, 16, 128, 256, True)
CAPACITIES = (8,) if FAKE else (128, 1024, 4000)  # positions that a step attends to
PROMPT, STEPS = (16, 3) if FAKE else (2048, 64)
DEVICE, DTYPE = ("cpu", torch.float32) if FAKE else ("cuda", torch.float16)


class Decoder:
    """A Llama with random weights; q, k and v are one product, like gate and up."""

    def __init__(self, geometry: tuple[Any, ...]) -> None:
        self.hidden, self.layers, self.heads, self.kv_heads, self.width, inner, vocabulary, biased = geometry
        self.sizes = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width]
        total = sum(self.sizes)
        shapes = [(total, self.hidden), (self.hidden, self.sizes[0]), (2 * inner, self.hidden), (self.hidden, inner)]
        self.weights = [[self.draw(*shape) for shape in shapes] for _ in range(self.layers)]
        self.bias = self.draw(total) if biased else None
        self.norm, self.embedding = (
            torch.ones(self.hidden, device=DEVICE, dtype=DTYPE),
            self.draw(vocabulary, self.hidden),
        )
        angles = torch.outer(torch.arange(8192), 1e4 ** -(torch.arange(0, self.width, 2) / self.width))
        angles = torch.cat((angles, angles), -1)
        self.cos, self.sin = angles.cos().to(DEVICE, DTYPE), angles.sin().to(DEVICE, DTYPE)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=DTYPE) * 0.02

    def bytes(self) -> int:
        return sum(w.nbytes for weights in self.weights for w in weights) + self.embedding.nbytes

    def make_cache(self, capacity: int) -> list[torch.Tensor]:
        shape = (2, 1, self.kv_heads, capacity, self.width)
        return [torch.zeros(shape, device=DEVICE, dtype=DTYPE) for _ in range(self.layers)]

    def run(self, ids: torch.Tensor, positions: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
        """The most probable token after ``ids`` [S]: one token that sees the whole cache, or a whole prompt."""
        x = self.embedding[ids]
        for (qkv, out, up, down), cache in zip(self.weights, caches, strict=True):
            h = F.linear(F.rms_norm(x, (self.hidden,), self.norm), qkv, self.bias)
            q, k, v = (part.view(len(ids), -1, self.width).transpose(0, 1)[None] for part in h.split(self.sizes, -1))
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            cache[0].index_copy_(2, positions, k)
            cache[1].index_copy_(2, positions, v)
            prompt = len(ids) > 1
            keys, values = (k, v) if prompt else (cache[0], cache[1])
            a = F.scaled_dot_product_attention(q, keys, values, is_causal=prompt, enable_gqa=True)
            x = x + F.linear(a[0].transpose(0, 1).flatten(1), out)
            gate, value = F.linear(F.rms_norm(x, (self.hidden,), self.norm), up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * value, down)
        return F.linear(F.rms_norm(x[-1:], (self.hidden,), self.norm), self.embedding).argmax(-1)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return x * self.cos[positions] + torch.cat((-two, one), -1) * self.sin[positions]


def wait() -> None:
    if not FAKE:
        torch.cuda.synchronize()


@torch.inference_mode()
def compare(name: str) -> None:
    """Milliseconds of a prompt, of a step as a CUDA graph, and of a compiled step."""
    model = Decoder(TINY if FAKE else GEOMETRIES[name])
    report(model=name, weight_mb=model.bytes() / 1e6)
    prompt, places = torch.zeros(PROMPT, dtype=torch.long, device=DEVICE), torch.arange(PROMPT, device=DEVICE)
    caches = model.make_cache(PROMPT)
    measure("prefill_ms", lambda: model.run(prompt, places, caches), 5)
    for capacity in CAPACITIES:
        measure_step(f"graph_{capacity}_ms", model, capacity, record)
    for capacity in CAPACITIES[:2]:  # last, because compiling takes most of the item's time
        options = {"backend": "eager"} if FAKE else {"mode": "reduce-overhead"}
        measure_step(
            f"compiled_{capacity}_ms", model, capacity, lambda step, options=options: torch.compile(step, **options)
        )


def measure_step(name: str, model: Decoder, capacity: int, wrap: Callable[[Any], Any]) -> None:
    """Time steps with ``capacity`` positions in the cache, all visible."""
    caches = model.make_cache(capacity)
    position = torch.tensor([capacity - 1], device=DEVICE)
    ids = torch.zeros(1, dtype=torch.long, device=DEVICE)
    try:
        measure(name, wrap(lambda: model.run(ids, position, caches)), STEPS)
    except Exception as error:  # noqa: BLE001  # recorded; the next way is tried
        report(**{name: f"{type(error).__name__}: {error}"[:300]})
        expect(False, f"{name}: {type(error).__name__}")


def record(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as a CUDA graph, recorded after three runs on another stream."""
    if FAKE:
        report(graph="needs a GPU: timed without one")
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(name: str, work: Callable[[], Any], count: int) -> None:
    for _ in range(3):
        work()
        wait()
    report(**{name: middle(timed(lambda: (work(), wait()), count))})


ITEMS = {name: partial(compare, name) for name in GEOMETRIES}
if __name__ == "__main__":
    main(ITEMS)
