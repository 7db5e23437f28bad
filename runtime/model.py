"""The runtime's front door: load a bundle, generate text."""

import threading
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from llmc.bundle import Manifest, read_bundle
from llmc.errors import RequestError, UsageError
from llmc.runtime.chat import ChatTemplate
from llmc.runtime.machine import usable_threads
from llmc.runtime.memory import check_load
from llmc.runtime.results import GenerationResult, Timings, Usage
from llmc.runtime.runner import Runner
from llmc.runtime.sampling import SamplingParams, make_sampler
from llmc.runtime.sessions import open_session
from llmc.runtime.text import TextStream
from llmc.runtime.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


def load(
    bundle: str | Path,
    *,
    threads: int | None = None,
    max_context: int | None = None,
    prefill_chunk: int | None = None,
    self_test: bool | None = None,
    memory: int | None = None,
) -> "Model":
    """Load a bundle.

    Args:
        bundle: the folder that ``llmc build`` wrote.
        threads: threads for the model; default: the affinity mask, cut by the cgroup's CPU quota, and no more than
            ``llmc build --auto`` found best on a machine of this size.
        max_context: longest sequence in tokens; default and upper bound: what the bundle was built for.
        prefill_chunk: prompt tokens per call; default and upper bound: what memory was planned for.
        self_test: replay golden prompts before anything else; default: the first time that this machine loads this
            bundle with this engine, as far as the cache remembers.
        memory: bytes that this process may take, in which the whole of ``max_context`` must fit; default: what is
            available, and the cache is held against it as it grows.

    Raises:
        BundleError: the folder is no whole bundle, or not for this machine or version, or fails the self-test.
        MissingExtraError: the engine is not installed.
        ResourceError: memory does not suffice.
        UsageError: an argument is out of range.
    """
    folder = Path(bundle)
    manifest = read_bundle(folder)
    limits = manifest.limits
    context = _in_range("max_context", max_context, limits.max_context, limits.max_context)
    chunk = _in_range("prefill_chunk", prefill_chunk, limits.prefill_chunk, limits.prefill_chunk)
    workers = _in_range("threads", threads, _default_threads(manifest.recipe.threads), 1024)
    from llmc.runtime.selftest import check_once  # which needs a model

    check_load(folder, manifest, context, memory)
    with ThreadPoolExecutor(1) as pool:  # reading a large vocabulary takes about as long as opening the graphs
        tokenizer = pool.submit(Tokenizer.from_folder, folder)
        session = open_session(folder, manifest, workers)
        runner = Runner(session, manifest, context, chunk)
        model = Model(folder, manifest, tokenizer.result(), runner, workers)
    try:
        check_once(model, self_test)
    except BaseException:
        model.close()
        raise
    return model


def _default_threads(measured: int | None) -> int:
    """All usable ones, or as many as a search found best where it had about as many to choose from: all or half."""
    usable = usable_threads()
    return min(usable, measured) if measured is not None and usable <= 2 * measured else usable


def _in_range(name: str, value: int | None, default: int, highest: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
        raise UsageError(f"{name} is {value!r}, expected 1 ... {highest}")
    return value


class Model:
    """A loaded bundle. Any thread may call it; requests take turns. Close it, or use it as a context manager."""

    def __init__(self, folder: Path, manifest: Manifest, tokenizer: Tokenizer, runner: Runner, threads: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.runner = runner
        self.threads = threads
        self._chat_template: ChatTemplate | None = None
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._running: _Request | None = None
        self._closed = False

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> GenerationResult:
        """Complete ``prompt`` (text, or token ids taken as they are).

        Args:
            sampling: fields of :class:`llmc.runtime.sampling.SamplingParams`; what is left out comes from the
                checkpoint's generation defaults.

        Raises:
            RequestError: the prompt is empty or too long, or is not valid text.
            UsageError: a sampling value is unknown or out of range, or the prompt is bytes.
        """
        return self.stream(prompt, **sampling).finish()

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> "Stream":
        """Like :meth:`generate`, as an iterator of text; its ``result`` is there once the iterator is used up."""
        self._check_open()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if sampling.get("max_tokens") is None:  # nobody asked for more than fits
            sampling["max_tokens"] = max(1, min(SamplingParams.max_tokens, self.runner.max_context - len(ids)))
        params = SamplingParams.from_defaults(self.manifest.generation, **sampling)
        self.runner.check_tokens("stop_token_ids holds", params.stop_token_ids)
        self.runner.check_prompt(ids, params.max_tokens)
        return Stream(self, ids, params)

    def chat(self, messages: Messages, **sampling: Any) -> GenerationResult:
        """Answer ``messages`` ([{"role": ..., "content": ...}, ...]) through the checkpoint's chat template."""
        return self.stream_chat(messages, **sampling).finish()

    def stream_chat(self, messages: Messages, **sampling: Any) -> "Stream":
        """Like :meth:`chat`, as an iterator of text."""
        prompt = self.chat_template.render(messages, add_generation_prompt=True)
        # The template writes the special tokens itself.
        return self.stream(self.tokenizer.encode(prompt, add_special_tokens=False), **sampling)

    @property
    def engine_version(self) -> str:
        """Version of the engine library in use."""
        return self.runner.session.engine_version

    @property
    def chat_template(self) -> ChatTemplate:
        """The bundle's chat template.

        Raises:
            RequestError: the model has none.
        """
        if self._chat_template is None:
            self._chat_template = ChatTemplate.from_folder(self.folder, self.tokenizer)
        return self._chat_template

    def close(self) -> None:
        """Free the engine and its memory; further requests are refused.

        A request that another thread runs is waited for; a stream that this thread left open ends here.
        """
        if self._holder == threading.get_ident() and self._running is not None:
            self._running.stop()
        if not self._closed:
            with self._turn():
                self._closed = True
                self.runner.session.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the model is closed; load the bundle again")

    @contextmanager
    def _turn(self, request: "_Request | None" = None) -> Iterator[None]:
        """Hold the engine; a thread that already holds it would wait for itself."""
        if self._holder == threading.get_ident():
            raise RequestError("another stream of this thread is still open; use it up or close it first")
        with self._lock:
            self._holder, self._running = threading.get_ident(), request
            try:
                yield
            finally:
                self._holder = self._running = None


def _token_ids(prompt: object) -> list[int]:
    """Token ids as plain integers.

    Raises:
        UsageError: anything else, such as floats, which numpy would convert without a word.
    """
    if isinstance(prompt, bytes | bytearray):
        raise UsageError("the prompt is bytes, expected text or token ids; decode it first")
    listed = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, memoryview)
    ids: list[Any] = list(prompt) if listed else [None]  # type: ignore[call-overload]
    if not all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in ids):
        raise UsageError(f"the prompt is {prompt!r:.60}, expected text or a list of token ids (integers)")
    return [int(token) for token in ids]


class Stream:
    """An iterator over the text of one request. It holds the model from the first item until it ends or is closed."""

    def __init__(self, model: Model, prompt: Sequence[int], params: SamplingParams) -> None:
        # The generator knows the request and not the stream: a cycle would keep the model until garbage is collected.
        self._request = _Request(model, prompt, params)
        self._parts = self._request.parts()

    def __iter__(self) -> Iterator[str]:
        return self._parts

    def __next__(self) -> str:
        return next(self._parts)

    @property
    def token_ids(self) -> list[int]:
        """Tokens sampled so far."""
        return self._request.token_ids

    @property
    def result(self) -> GenerationResult:
        """The whole request, once the stream is used up.

        Raises:
            RequestError: it is not.
        """
        if self._request.result is None:
            raise RequestError("the stream is not used up, so it has no result yet")
        return self._request.result

    def finish(self) -> GenerationResult:
        """Use the stream up and return its result."""
        for _ in self._parts:
            pass
        return self.result

    def close(self) -> None:
        """Stop here and let the next request in.

        Raises:
            RequestError: another thread is computing the next item.
        """
        self._request.stop()


class _Request:
    """What a stream and its generator share."""

    def __init__(self, model: Model, prompt: Sequence[int], params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.result: GenerationResult | None = None
        self._model = model
        self._prompt = prompt
        self._params = params
        self._generator: weakref.ref[Generator[str, None, None]] | None = None

    def parts(self) -> Generator[str, None, None]:
        """The generator that does the work, made once."""
        generator = self._generate()
        self._generator = weakref.ref(generator)
        return generator

    def stop(self) -> None:
        """Close the generator where it waits."""
        generator = self._generator() if self._generator is not None else None
        if generator is not None:
            try:
                generator.close()
            except ValueError as error:  # it is running
                raise RequestError("the stream is computing its next item; close it after that") from error

    def _generate(self) -> Generator[str, None, None]:
        start = time.perf_counter()
        with self._model._turn(self):
            self._model._check_open()
            yield from self._run(start)

    def _run(self, start: float) -> Iterator[str]:
        params, runner = self._params, self._model.runner
        manifest = self._model.manifest
        sampler = make_sampler(
            params,
            manifest.geometry.vocab_size,
            prompt_length=len(self._prompt),
            eos_token_ids=manifest.generation.eos_token_ids,
        )
        text = TextStream(self._model.tokenizer, params.stop)
        ends = set(params.stop_token_ids) | (
            set() if params.ignore_eos else set(self._model.manifest.generation.eos_token_ids)
        )
        emitted: list[str] = []
        reason: Literal["stop", "length"] = "length"
        first = start
        for token in runner.tokens(self._prompt, sampler):
            self.token_ids.append(token)
            if len(self.token_ids) == 1:
                first = time.perf_counter()
            if token in ends:
                reason = "stop"
                break
            if delta := text.push(token):
                emitted.append(delta)
                yield delta
            if text.stopped is not None:
                reason = "stop"
                break
            if len(self.token_ids) == params.max_tokens:
                break
        end = time.perf_counter()
        if rest := text.finish():
            emitted.append(rest)
            yield rest
        if text.stopped is not None:  # the rest may complete a stop string
            reason = "stop"
        self.result = GenerationResult(
            text="".join(emitted),
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            usage=Usage(len(self._prompt), len(self.token_ids)),
            timings=Timings(first - start, end - first, len(self._prompt), len(self.token_ids) - 1),
            seed=sampler.seed,
        )
