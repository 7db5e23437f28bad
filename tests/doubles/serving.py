"""The service on a real socket, in a thread of the tests' own process."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from llmc.bundle import read_bundle, write_manifest
from llmc.publish import file_entries
from llmc.runtime.server.app import make_app
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.dialects.socket import Sockets
from llmc.runtime.server.http.guarded import uvicorn_options
from llmc.runtime.server.models.pool import Pool

# Qwen 3's form of calls and thoughts, which are off unless asked for.
ABLE_TEMPLATE = """\
{% if tools %}<|im_start|>system
Write <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one of {{ tools | tojson }}<|im_end|>
{% endif %}{% if verbosity %}<|im_start|>system
Verbosity: {{ verbosity }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}"""


def retold(bundle: Path, folder: Path, template: str = ABLE_TEMPLATE, marks: Sequence[str] = ()) -> Path:
    """A copy of a bundle with another chat template; ``marks`` are special tokens, in the place of its last ones."""
    shutil.copytree(bundle, folder)
    if marks:
        told = json.loads((folder / "tokenizer.json").read_text())
        vocab = told["model"]["vocab"]
        for name, mark in zip(sorted(vocab, key=vocab.__getitem__)[-len(marks) :], marks, strict=True):
            vocab[mark] = vocab.pop(name)
            told["added_tokens"].append({**told["added_tokens"][0], "content": mark, "id": vocab[mark]})
        told["model"]["merges"] = [pair for pair in told["model"]["merges"] if "".join(pair) in vocab]
        (folder / "tokenizer.json").write_text(json.dumps(told))
    (folder / "chat_template.jinja").write_text(template)
    manifest = read_bundle(bundle)
    write_manifest(replace(manifest, files=file_entries(folder, manifest.files)), folder)
    return folder


@contextmanager
def serving(
    config: ServerConfig, around: Callable[[Any, ServerConfig], Any] = lambda app, config: app
) -> Iterator[str]:
    """The service of these settings at a free port of this machine; the address, as ``http://127.0.0.1:12345``.

    Args:
        around: what stands around the application, such as keys and limits.
    """
    ready, urls, failed = threading.Event(), [], []
    stop: list[Callable[[], None]] = []

    async def run() -> None:
        options, formats = config.load_options, config.tool_formats
        pool = Pool(config.models, memory=config.memory, load_options=options, tool_formats=formats)
        try:
            await pool.warm(*config.warm)
            app = Sockets(around(make_app(config, pool), config), config)
            own = {"port": 0, "log_config": None, "lifespan": "off"}
            server = uvicorn.Server(uvicorn.Config(app, **own, **uvicorn_options(config)))
            serve = asyncio.create_task(server.serve())
            while not server.started and not serve.done():
                await asyncio.sleep(0.01)
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(setattr, server, "should_exit", True))
            urls.append(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
            ready.set()
            await serve
        finally:
            await pool.close(drain=False)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    ready.wait()
    if failed:
        raise failed[0]
    try:
        yield urls[0]
    finally:
        stop[0]()
        thread.join(30)
        if failed:
            raise failed[0]
