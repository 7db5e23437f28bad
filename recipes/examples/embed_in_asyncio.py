"""An asyncio service: answers stream as they come, and a client that disconnects cancels its request.

python recipes/examples/embed_in_asyncio.py BUNDLE
"""

import asyncio
import sys

from llmc.runtime import Generator, load


async def answer(model: Generator, prompt: str) -> str:
    """Stream one answer; another request's pieces come in between."""
    parts = []
    async for text in model.stream(prompt, max_tokens=16, temperature=0):
        print(f"{prompt!r}: {text!r}")
        parts.append(text)
    return "".join(parts)


async def hang_up(model: Generator) -> bool:
    """A client that goes away: cancelling the task cancels the request."""
    task = asyncio.ensure_future(answer(model, "while True:\n"))
    await asyncio.sleep(0.01)
    return task.cancel()


async def serve(bundle: str) -> list[str]:
    """Two concurrent answers, and a third whose client disconnects."""
    with load(bundle) as model:
        two = asyncio.gather(answer(model, "def add(a, b):\n"), answer(model, "import sys\n"))
        await hang_up(model)
        return await two


def main(bundle: str) -> list[str]:
    """Run the event loop."""
    return asyncio.run(serve(bundle))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} BUNDLE")
    main(sys.argv[1])
