"""The runtime's front door: load a bundle, generate text."""

import hashlib
import inspect
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llmc.bundle import (
    STAGE_FOLDER,
    Manifest,
    list_adapters,
    list_unlisted_files,
    publication,
    read_bundle,
    read_same,
    read_undisturbed,
    verify_files,
)
from llmc.bundle.model.kinds import allows, refuse
from llmc.errors import BundleError, EngineClosedError, GrammarError, UsageError, format_name, format_value
from llmc.runtime.api import DRAFT_WORDS
from llmc.runtime.api.chat import ChatHandle, ChatResult
from llmc.runtime.api.handle import Handle
from llmc.runtime.api.options import Determinism, EngineOptions, row_limit
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import GenerationResult
from llmc.runtime.encoder import TextEncoder
from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.input_processor import text_tokens
from llmc.runtime.host.huge_pages import gather_soon, note_others
from llmc.runtime.host.integrity import check_files
from llmc.runtime.host.machine import available_memory, resident_bytes, usable_threads
from llmc.runtime.kv.budget import check_load, opening_bytes, plan_load
from llmc.runtime.kv.prefix_cache import BLOCK, PrefixCache
from llmc.runtime.kv.prefix_store import PrefixStore
from llmc.runtime.runner.prefill import SingleRunner
from llmc.runtime.sampling.neighbours import neighbour
from llmc.runtime.sampling.params import GUIDES, SamplingParams
from llmc.runtime.sampling.ranges import integer
from llmc.runtime.selftest import VerifyReport, check_once, replay, replay_stage
from llmc.runtime.sessions import emulate_target, open_engine, open_session
from llmc.runtime.sessions.adapters import AdapterInfo
from llmc.runtime.sessions.onnxruntime.stateless import StatelessSession
from llmc.runtime.sessions.staged import Stages, plan_together, read_stages
from llmc.runtime.speculation.drafters import Drafter, PromptLookup
from llmc.runtime.speculation.head_drafter import AssistantDrafter, HeadDrafter
from llmc.runtime.speculation.model_drafter import ModelDrafter
from llmc.runtime.text.control_tokens import Disguise
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.text.trial import try_tokenizer
from llmc.runtime.tools.calls import read_tools
from llmc.runtime.tools.formats import writer
from llmc.runtime.tools.plan import ChatPlan, plan_chat
from llmc.runtime.tools.thinking import marks_of
from llmc.runtime.vision.tiles import Tiles
from llmc.runtime.vision.tower import Tower, take_images

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmc.runtime.text.chat_template import ChatTemplate

log = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, Any]]


def load(
    bundle: str | Path,
    *,
    threads: int | None = None,
    max_context: int | None = None,
    prefill_chunk: int | None = None,
    self_test: bool | None = None,
    verify: bool | None = None,
    memory: int | None = None,
    emulate: bool = False,
    device: int = 0,
    adapters: Mapping[str, str | Path] | None = None,
    stages: Any = None,
    **options: Any,
) -> "Model":
    """Load a bundle; if a build replaces it meanwhile, the new one, and never a mixture.

    Args:
        bundle: the folder that ``llmc build`` wrote.
        threads: threads for the model; default: the affinity mask, cut by the cgroup's CPU quota.
        max_context: longest sequence in tokens; default and upper bound: what the bundle was built for.
        prefill_chunk: prompt tokens per call; default and upper bound: what memory was planned for.
        self_test: replay golden prompts first; default: the shortest of them, the first time that this machine loads
            this bundle with this engine, as far as the cache remembers.
        verify: hash every file before it is used; default: 64 MiB of each file, the first time that this machine loads
            these files, unless ``self_test`` is False; False: none.
        memory: bytes that this process may take, in which the whole of ``max_context`` must fit; where none was named,
            the context is lowered to what fits, with a warning. Default: what is available, checked as the cache grows.
        emulate: run the graph of a bundle for a GPU on the CPU: slow, to check it where there is no such GPU.
        device: the number of the GPU, of those that are visible, that a bundle for GPUs runs on.
        adapters: folders that ``llmc adapter add`` wrote, by the names that requests give; default: the bundle's own.
        stages: opens the stages before the last of a model in stages; default: in this process. Its ``exact`` says
            that float32 is to go over the wire: at ``batch`` and ``strict``, and of experts, which have neither.
        options: fields of :class:`llmc.runtime.api.options.EngineOptions`.

    Raises:
        GpuError: GPU, driver or engine library are missing, unsupported or fail.
        BundleError: the folder is no whole bundle, or not for this machine or version, or fails the self-test.
        MissingExtraError: the engine is not installed.
        ResourceError: memory does not suffice.
        UsageError: an argument is out of range.
    """

    def open_bundle(folder: Path) -> "Model":
        manifest = emulate_target(read_bundle(folder)) if emulate else read_bundle(folder)
        before = read_stages(folder, manifest) if stages is None else {}  # all in this process
        manifest = plan_together(manifest, before)
        limits, engine_options = manifest.limits, _options(options)
        _in_range("memory", memory, 0, 1 << 50)
        fitting = limits.max_context if memory is None else _find_fitting_context(folder, manifest, memory, max_context)
        context = _in_range("max_context", max_context, fitting, limits.max_context)
        vision, most = manifest.geometry.vision, limits.prefill_chunk
        chunk = _in_range("prefill_chunk", prefill_chunk, most, most, min(most, vision.least_chunk) if vision else 1)
        workers = _in_range("threads", threads, usable_threads(), 1024)
        _check_options(folder, manifest, context, engine_options, options)
        check_load(folder, manifest, context, memory)
        for part, its_manifest in {folder: manifest, **before}.items():
            check_files(part, its_manifest, False if verify is None and self_test is False else verify)
        others = note_others(manifest.memory["weights"].fixed)
        opened = threading.Event()

        def read_tokenizer() -> Tokenizer:
            try_tokenizer(folder)
            opened.wait(HEAD_START_S)
            return Tokenizer.from_folder(folder)

        with ThreadPoolExecutor(1) as pool:  # reading a large vocabulary takes about as long as opening the graphs
            tokenizer = pool.submit(read_tokenizer)
            runner: SingleRunner | TextEncoder
            tower = None
            if manifest.geometry.encoder:
                result = str(manifest.geometry.encoder.result)
                session = StatelessSession(folder, manifest, workers, "encode", result)
                opened.set()
                runner = TextEncoder(folder, manifest, session, tokenizer.result(), context)
            else:
                tower = open_tower(folder, manifest, workers)
                exact = engine_options.determinism is not Determinism.FAST or bool(manifest.geometry.mixtures)
                opener = partial(Stages, read=before) if stages is None else partial(stages, exact=exact)
                placed = {"stages": opener} if manifest.stage.before else {}
                runner = SingleRunner(open_session(folder, manifest, workers, device, **placed), context, chunk)
                opened.set()
            model = Model(folder, manifest, tokenizer.result(), runner, workers, engine_options, memory, tower)
        gather_soon(others)
        try:
            check_once(model, self_test)
            if engine_options.draft is not None:
                _ = model.engine  # a draft that does not fit is refused now, and not by the first request
            for name, place in (list_adapters(folder) if adapters is None else adapters).items():
                model.load_adapter(name, place)
        except BaseException:
            model.close()
            raise
        return model

    return read_undisturbed(_folder(bundle), open_bundle, Model.close)


def open_tower(folder: Path, manifest: Manifest, threads: int) -> Tower | None:
    """The tower of a bundle that sees."""
    vision = manifest.geometry.vision
    if vision is None:
        return None
    session = StatelessSession(folder, manifest, threads, "vision", "embeddings")
    return Tower(vision, session.run)


def _check_options(
    folder: Path, manifest: Manifest, context: int, options: EngineOptions, given: Mapping[str, Any]
) -> None:
    refuse(manifest.geometry, *(name for name, value in given.items() if value and value not in ("auto", "none")))
    row_limit(manifest, options)
    if options.determinism is Determinism.STRICT and context < SHORTEST_STRICT:
        raise UsageError("max_context", f"is {context}, expected {SHORTEST_STRICT} or more with determinism 'strict'")


def verify(
    bundle: str | Path,
    *,
    threads: int | None = None,
    emulate: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> VerifyReport:
    """Hash every file, load the bundle and replay its golden prompts; with ``emulate`` a GPU's graph on the CPU. Stages
    are verified alone, and then all together.

    Raises:
        BundleError: a file is corrupt, or results differ beyond the manifest's tolerance.
    """
    folder = _folder(bundle)

    def verified(place: Path) -> VerifyReport:
        manifest = read_bundle(place)
        for name in verify_files(place, manifest):
            progress(f"hashed {name}")
        if not manifest.stage.is_last:
            with closing(open_engine(place, manifest, threads or usable_threads())) as session:
                return replay_stage(place, manifest, session)
        for number in range(len(manifest.stage.before)):
            stage = place / STAGE_FOLDER.format(number)
            if not stage.is_dir():
                raise BundleError(
                    f"{place} has whole files of its own, and {stage} is not there; its golden prompts go through all "
                    "stages: verify it where they all are"
                )
            verify(stage, threads=threads, progress=progress)
        with load(place, threads=threads, self_test=False, verify=False, emulate=emulate) as model:
            return replace(replay(model, progress), unlisted=list_unlisted_files(place, manifest))

    return read_undisturbed(folder, verified)


def _folder(bundle: str | Path) -> Path:
    """The path of a bundle, or UsageError for what no engine's library can open."""
    if not isinstance(bundle, str | os.PathLike):
        raise UsageError("bundle", f"is {bundle!r:.60}, expected the path of a folder that llmc build wrote")
    folder = Path(bundle)
    if re.search("[\0\ud800-\udfff]", str(folder)):
        raise UsageError("bundle", f"is {str(folder)!a}, which is not text in UTF-8", "rename the folder")
    try:
        folder.exists()
    except OSError as error:
        raise UsageError("bundle", f"is {folder!s:.200}, which cannot be looked at ({error.strerror})") from error
    return folder


def _find_fitting_context(folder: Path, manifest: Manifest, memory: int, asked: int | None) -> int:
    """The longest context that fits into ``memory``, all of it where none does, for :func:`check_load` to refuse."""
    most = manifest.limits.max_context
    fitting = plan_load(manifest, most).verdict(memory).largest_context or most
    if fitting < most and asked is None:
        log.warning("%s: %d MB hold a context of %d tokens, not of %d", folder, memory // 1_000_000, fitting, most)
    return fitting


def _options(given: Mapping[str, Any]) -> EngineOptions:
    known = [field.name for field in fields(EngineOptions)]
    if unknown := sorted(given.keys() - set(known)):
        close = neighbour(unknown[0], [*known, *inspect.signature(load).parameters])
        hint = f"did you mean {close}?" if close else f"the engine's options are {', '.join(known)}"
        raise UsageError(format_name(unknown[0]), "is no argument of load", hint)
    return EngineOptions(**given)


def template_variables(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Variables of a chat template: those that arguments of their own give are not among them."""
    own = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    own |= {"disguise", "self", "template", "write"}
    if given is None:
        return {}
    if not isinstance(given, Mapping) or any(type(name) is not str or name in own for name in given):
        raise UsageError(
            "chat_template_kwargs",
            f"is {format_value(given)}, expected a mapping of names to values, none of them named "
            f"{', '.join(sorted(own))}",
        )
    return given


def _in_range(name: str, value: int | None, default: int, highest: int, lowest: int = 1) -> int:
    if value is None:
        return default
    integer(lowest, highest).check(name, value)
    return value


class Model:
    """A loaded bundle. Any thread may call it; requests share batches. Close it, or use it as a context manager.

    One that embeds or ranks has :meth:`embed` or :meth:`rank` and nothing that generates, and the other way round.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        tokenizer: Tokenizer,
        runner: SingleRunner | TextEncoder,
        threads: int,
        options: EngineOptions | None = None,
        memory: int | None = None,
        tower: Tower | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tokenizer = tokenizer
        self._runner = runner
        self.threads = threads
        self._options = options or EngineOptions()
        self._memory = memory
        self._tower = tower
        self._chat_template: ChatTemplate | None = None
        self._publication = publication(folder)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._closed = False

    @property
    def runner(self) -> SingleRunner:
        """One sequence at a time, for benchmarks and evaluation; not while requests run. UsageError if it does not
        generate."""
        if isinstance(self._runner, TextEncoder):
            raise UsageError("bundle", f"{self._runner.ability} and generates no text", "load one that does")
        return self._runner

    @property
    def encoder(self) -> TextEncoder:
        """Texts to vectors or scores. UsageError if the bundle generates."""
        if not isinstance(self._runner, TextEncoder):
            raise UsageError(
                "bundle",
                "generates text (llmc run, Model.generate) and neither embeds nor ranks",
                "load one of an embedding model or a reranker",
            )
        return self._runner

    @property
    def tower(self) -> Tower:
        """Images to rows of embeddings. UsageError if the bundle takes text alone."""
        if self._tower is None:
            raise UsageError(
                "messages",
                "holds an image, and the model takes text alone",
                "send text, or take a bundle of a model that sees, exported without --text-only",
            )
        return self._tower

    @property
    def planned_bytes(self) -> int:
        """Bytes of the process that it takes by its bundle's plan, with caches as large as they are now."""
        plan = self.manifest.memory
        if isinstance(self._runner, TextEncoder):
            return plan.total(self._runner.max_context)
        cache, engine = self._runner.session.cache, self._engine
        prefixes = 0 if engine is None or engine.prefixes is None else engine.prefixes.bytes
        return plan.total(cache.capacity, max(1, cache.rows)) + prefixes

    def embed(
        self,
        texts: Sequence[str],
        *,
        dimensions: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> "NDArray[np.float32]":
        """Vectors of texts, float32 [n, d], of length one where the checkpoint normalises.

        Args:
            texts: any number of them.
            dimensions: the first so many values of each, made of length one again (Matryoshka); default: all, or what
                the checkpoint says.
            instruction: a prompt's name, as ``query`` or ``document``, a task in words, or a whole prompt that ends in
                a colon; see :class:`llmc.runtime.text.prompts.Prompts`. Default: the checkpoint's, mostly none.
            truncate: leave the end of a text out that is too long; by default it is refused.

        Raises:
            UsageError: the bundle does not embed, or an argument is out of range.
            RequestError: a text is too long, has no tokens, or is no valid text.
        """
        return self.encoder.embed(texts, dimensions=dimensions, instruction=instruction, truncate=truncate)

    def rank(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None, truncate: bool = False
    ) -> "NDArray[np.float32]":
        """Scores of documents for a query, float32 [n] in the order given; the higher the better: logits, or after a
        sigmoid.

        Args:
            query: the question.
            documents: any number of texts.
            instruction: a prompt's name or the task in words; default: the checkpoint's.
            truncate: leave the end of a document out that is too long; by default it is refused.

        Raises:
            UsageError: the bundle does not rank, or an argument is of another type.
            RequestError: a text is too long or no valid text, or the chat template fails.
        """
        return self.encoder.rank(query, documents, instruction=instruction, truncate=truncate)

    @property
    def engine(self) -> Engine:
        """The engine that serves the requests, made when first asked for.

        Raises:
            EngineClosedError: the model is closed.
            DraftError, BundleError: the draft model does not fit or cannot be loaded.
        """
        with self._lock:
            if self._closed:
                raise EngineClosedError("the model is closed; load the bundle again")
            if self._engine is None:
                self._engine = make_engine(self, self._options, self._memory)
                weakref.finalize(self, self._engine.close).atexit = False
            return self._engine

    def submit(self, request: Request) -> Handle:
        """:meth:`llmc.runtime.engine.engine.Engine.submit`; the handle keeps the model."""
        if not isinstance(request, Request):
            raise UsageError(
                "request", f"is {format_value(request)}, expected a Request", "stream and generate take prompts"
            )
        handle = self.engine.submit(request)
        handle.owner = self
        return handle

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> GenerationResult:
        """Complete ``prompt`` (text, or token ids taken as they are).

        Args:
            prompt: a text's special tokens are special tokens; for a stranger's words there is :meth:`chat`.
            sampling: fields of :class:`llmc.runtime.SamplingParams`, by default the checkpoint's, and those of
                :class:`llmc.runtime.api.request.Request`.

        Raises:
            RequestError: the prompt is empty or too long, or is not valid text.
            UsageError: a sampling value is unknown or out of range, or the prompt is bytes.
        """
        return self.stream(prompt, **sampling).result()

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> Handle:
        """Like :meth:`generate`, as an iterator of text; its ``result()`` is there at the end."""
        return self.submit(self.request(prompt, **sampling))

    def chat(self, messages: Messages, **arguments: Any) -> ChatResult:
        """Answer ``messages`` ([{"role": ..., "content": ...}, ...]) through the checkpoint's chat template.

        A conversation goes on with ``[*messages, result.message.to_dict()]`` and, for each call of a tool, ``{"role":
        "tool", "tool_call_id": ..., "content": ...}``. Takes what :meth:`stream_chat` does, and raises that and what
        :meth:`llmc.runtime.api.handle.Handle.result` raises.
        """
        return self.stream_chat(messages, **arguments).result()

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        tool_format: str | None = None,
        reasoning_budget: int | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        parse_special: bool = False,
        ignored: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> ChatHandle:
        """Like :meth:`chat`, as an iterator of the answer's text, with deltas of content, reasoning and calls.

        Args:
            messages: what was said.
            tools: functions that the model may call, ``{"type": "function", "function": {"name": ..., "description":
                ..., "parameters": JSON schema}}``, which its template shows to it. Calls hold to the schemas.
            tool_choice: ``auto`` lets the model answer or call, ``required`` makes it call, a tool's name makes it call
                that one, and ``none`` shows the tools to the template and reads no calls.
            parallel_tool_calls: False for one call at most.
            tool_format: a name of :data:`llmc.runtime.tools.formats.FORMATS`, also where the messages tell the model
                of the tools and the template does not: earlier calls are then written so, too, as part of the content;
                default: the one that the model was loaded with, or what the template teaches.
            reasoning_budget: tokens of reasoning at most, after which the answer begins; default: no bound.
            documents: texts to answer from, for templates that show them.
            chat_template_kwargs: whatever else the template reads, such as ``enable_thinking``.
            continue_final_message: go on with the text of the last message, which is the assistant's, instead of
                answering it; the result has what is new. No reasoning comes before it.
            parse_special: take special tokens that messages spell, such as ``<|im_end|>``, for special tokens; then
                whoever writes a message can end it, and speak in any role. By default they are text.
            ignored: is told the name of what is left out, for it changes little: names of messages that the template
                does not show; and where the model need not call, the places of what cannot be enforced in the schema of
                a tool that is not ``strict``. By default these are refused.
            sampling: as for :meth:`generate`.

        Raises:
            RequestError: the template refuses the messages, or they are too long.
            GrammarError: the schema of a tool cannot be enforced.
            UsageError: the messages are malformed, or a value is, or the template teaches no format of calls, or does
                not show to the model what is given.
        """
        tool_format = self._options.tool_format if tool_format is None else tool_format
        variables = {"tools": tools, "documents": documents, **template_variables(chat_template_kwargs)}
        prompt, ids, images = self._chat_prompt(
            messages,
            parse_special,
            sampling.get("on_overflow"),
            not continue_final_message,
            continue_final_message=continue_final_message,
            write=writer(tool_format),
            ignored=ignored,
            **variables,
        )
        plan = plan_chat(
            self.chat_template.source(tools is not None),
            prompt,
            read_tools(tools),
            tool_choice,
            parallel=parallel_tool_calls,
            tool_format=tool_format,
            reasoning_budget=reasoning_budget,
            goes_on=continue_final_message,
        )
        refuse(self.manifest.geometry, *(["tools"] if plan.calls is not None else []))
        if images:
            sampling["images"] = self.tower.compute_rows(images, ids)
        try:
            return self._submit_chat(ids, plan, plan, sampling)
        except GrammarError as error:
            for looser, left_out in plan.loosen_plans(error, sampling, allowed=ignored is not None):
                with suppress(GrammarError):
                    handle = self._submit_chat(ids, looser, plan, sampling)
                    if ignored is not None:
                        for place in left_out:
                            ignored(place)
                    return handle
            raise

    def _submit_chat(self, ids: list[int], plan: ChatPlan, read: ChatPlan, sampling: Mapping[str, Any]) -> ChatHandle:
        request = self.request(ids, **plan.make_sampling(self.tokenizer, sampling))
        parameters = request.params
        whole = bool(parameters.stop or parameters.stop_token_ids or request.stopping_criteria)
        shaped = any(sampling.get(name) is not None for name in GUIDES)
        parser = partial(read.parser, shaped=shaped, whole=whole)
        handle = self.engine.submit(request, partial(ChatHandle, parser=parser))
        handle.owner = self
        return handle

    def chat_tokens(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        parse_special: bool = False,
        on_overflow: str | None = None,
        tool_format: str | None = None,
    ) -> list[int]:
        """The prompt that :meth:`chat` makes of ``messages``, as token ids; takes and raises what :meth:`stream_chat`
        does.

        Args:
            add_generation_prompt: end with the beginning of the assistant's answer, unless the last message is one.
            on_overflow: as among the sampling values; where it drops text, not all tokens are made.
        """
        variables = {"tools": tools, "documents": documents, **template_variables(chat_template_kwargs)}
        begins = add_generation_prompt and not continue_final_message
        write = writer(self._options.tool_format if tool_format is None else tool_format)
        told = {"continue_final_message": continue_final_message, "write": write, **variables}
        return self._chat_prompt(messages, parse_special, on_overflow, begins, **told)[1]

    def _chat_prompt(
        self,
        messages: Messages,
        parse_special: bool,
        on_overflow: str | None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[str, list[int], list[Tiles]]:
        tokenizer, (messages, images) = self.tokenizer, take_images(messages)
        tower = self.tower if images else None
        disguise = None if parse_special else Disguise(tokenizer.controls)
        from llmc.runtime.text.shown import render_messages  # jinja, for those who chat

        prompt = render_messages(self.chat_template, messages, add_generation_prompt, disguise=disguise, **variables)

        def encode(text: str) -> list[int]:
            # The template writes the special tokens itself.
            return tokenizer.encode_disguised(text, disguise) if disguise else tokenizer.encode(text, False)

        shown, most = tokenizer.controls.unmark(prompt) if disguise else prompt, self.engine.max_context
        seen: list[Tiles] = []
        if tower is not None:
            prompt, seen = tower.write_images(prompt, images, tokenizer.controls.mark if disguise else str, most)
        return shown, text_tokens(tokenizer, prompt, encode, most, on_overflow), seen

    def reasoning_variables(self, wanted: bool) -> dict[str, Any]:
        """Variables of the chat template (``chat_template_kwargs``) that ask for reasoning, or for none.

        Raises:
            UsageError: ``reasoning`` is wanted of a template that knows none, or unwanted of one that always has it.
            RequestError: the model has no chat template.
        """
        template = self.chat_template
        if "enable_thinking" in template.variables(False):
            return {"enable_thinking": wanted}
        if (marks_of(template.source(False)) is not None) != wanted:
            has = "knows no reasoning" if wanted else "asks for reasoning in any case"
            raise UsageError(
                "reasoning", f"cannot be turned {'on' if wanted else 'off'}: the model's chat template {has}"
            )
        return {}

    def can_reason(self, tools: bool) -> bool:
        """True if answers to messages, with tools or without, may begin with reasoning that a budget can bound."""
        able = allows(self.manifest.geometry, "reasoning_budget")
        return able and marks_of(self.chat_template.source(tools)) is not None

    def request(self, prompt: str | Sequence[int], **arguments: Any) -> Request:
        """A request with the checkpoint's generation defaults for what ``arguments`` leave out.

        Args:
            arguments: fields of :class:`llmc.runtime.SamplingParams` and of :class:`llmc.runtime.api.request.Request`;
                ``parse_special=False`` takes special tokens that a text spells for text; ``suffix`` is the text after
                the gap that the answer fills, for tokenizers with marks for it.

        Raises:
            RequestError: the prompt is not valid text.
            UsageError: an argument is unknown or out of range, or the tokenizer has no marks of a gap.
        """
        parse_special, suffix = arguments.pop("parse_special", True), arguments.pop("suffix", None)
        own = {name: arguments.pop(name) for name in REQUEST_FIELDS & arguments.keys()}
        if suffix is not None:
            if arguments.get("on_overflow") not in (None, "refuse"):
                raise UsageError(
                    "on_overflow", "is given beside suffix, of which nothing may be dropped", "leave it out"
                )
            special = own.pop("add_special_tokens", True)
            prompt, ends = self.tokenizer.encode_gap(prompt, suffix, self.engine.max_context, special)
            arguments["stop_token_ids"] = [*(arguments.get("stop_token_ids") or ()), *ends]
        if isinstance(prompt, str):
            encoded = self.tokenizer.encode if parse_special else self.tokenizer.encode_plain
            encode = partial(encoded, add_special_tokens=own.pop("add_special_tokens", True))
            overflow = arguments.get("on_overflow")
            prompt = text_tokens(self.tokenizer, prompt, encode, self.engine.max_context, overflow)
        if arguments.get("max_tokens") is None:  # nobody asked for more than fits
            room = self.engine.max_context - (len(prompt) if isinstance(prompt, Sized) else 0)
            arguments["max_tokens"] = max(1, min(self._options.default_max_tokens, room))
        return Request(prompt, SamplingParams.from_defaults(self.manifest.generation, **arguments), **own)

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The loaded adapters by name, each with its hash (``sha256``) and ``rank``."""
        return self.engine.adapters.loaded

    def load_adapter(self, name: str, folder: str | Path) -> AdapterInfo:
        """Let requests name an adapter, from a folder that ``llmc adapter add`` wrote, while others run.

        Raises:
            UsageError: the name is taken, or none.
            ResourceError: as many adapters are loaded, or still used by requests, as the bundle was built for.
            BundleError: it is damaged or does not fit this bundle.
        """
        return self.engine.adapters.load(name, Path(folder))

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those that have it go on, and its memory is free after the last.

        Raises:
            RequestError: none of that name is loaded.
        """
        self.engine.adapters.unload(name)

    def metric_families(self, labels: Mapping[str, str]) -> Iterator[Any]:
        """The engine's metrics as families of prometheus-client, with ``labels`` on every sample."""
        if isinstance(self._runner, TextEncoder):  # which has no engine
            return iter(())
        from llmc.runtime.observe.prometheus import EngineCollector

        return EngineCollector(self.engine.metrics, labels).collect()

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        return self._runner.max_context

    @property
    def engine_version(self) -> str:
        return self._runner.session.engine_version

    @property
    def processor(self) -> str:
        """Name of the CPU or GPU."""
        return self._runner.session.processor

    @property
    def chat_template(self) -> "ChatTemplate":
        """The bundle's chat template; RequestError without one, BundleError if another bundle has taken this one's
        place."""
        if self._chat_template is None:
            from llmc.runtime.text.chat_template import ChatTemplate  # jinja, for those who chat

            read = partial(ChatTemplate.from_folder, tokenizer=self.tokenizer)
            self._chat_template = read_same(self.folder, self._publication, read)
        return self._chat_template

    def close(self, drain: bool = False) -> None:
        """Free the engine and its memory; requests that run fail, or with ``drain`` are finished first."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._tower is not None:
            self._tower.close()
        if self._engine is not None:
            self._engine.close(drain, then=self._runner.session.close)
        else:
            self._runner.session.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# A vocabulary is read without letting other threads of Python run: what opens the graphs gets to its library before.
HEAD_START_S = 0.2
REQUEST_FIELDS = {field.name for field in fields(Request)} - {"prompt", "params"}
# What the prefix cache takes by default: a share of the memory there is, and a bound that suits small machines.
# A strict step feeds a dummy token after the last one, so a prompt of one and a new token want three positions.
SHORTEST_STRICT = 3
PREFIX_SHARE, PREFIX_BYTES = 8, 256_000_000
# What may wait to be written to disk, beside that.
PENDING_BYTES = 64_000_000


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes for ``load(memory=...)``: ``least`` for one row of the longest context, ``most`` for all rows and prefixes,
    and ``draft`` beside them for a draft model.
    """

    least: int
    most: int
    draft: int


def memory_need(manifest: Manifest, options: Mapping[str, Any]) -> MemoryNeed:
    """The memory that a bundle takes when it is loaded with these arguments of :func:`load`."""
    limits = manifest.limits
    context = options.get("max_context") or limits.max_context
    keeps = allows(manifest.geometry, "prefix_cache_bytes")
    prefixes, draft = options.get("prefix_cache_bytes") if keeps else 0, options.get("draft")
    on_disk = options.get("prefix_cache_folder") is not None
    pending = PENDING_BYTES if on_disk else 0
    always = prefixes or (PREFIX_BYTES if on_disk else 0)
    rows = options.get("max_batch") or limits.max_batch
    drafted = 0 if draft in (None, *DRAFT_WORDS) else plan_load(read_bundle(Path(str(draft)))).total
    return MemoryNeed(
        max(plan_load(manifest, context).total, opening_bytes(manifest)) + always + pending,
        plan_load(manifest, context, rows).total + (PREFIX_BYTES if prefixes is None else prefixes) + pending,
        drafted,
    )


def default_memory() -> int:
    """Bytes that this process may take where nobody says how many: what it holds already, and what there is."""
    return available_memory() + resident_bytes()[0]


def make_engine(model: Model, options: EngineOptions, memory: int | None) -> Engine:
    """The engine of a loaded model.

    Raises:
        DraftError: the draft model has another tokenizer.
        BundleError, ResourceError: the draft model cannot be loaded.
    """
    manifest, runner = model.manifest, model.runner
    refuse(manifest.geometry, "answers")
    if options.draft == "auto":
        keeps = drafts_keep_bits(manifest, options.determinism)
        options = replace(options, draft="lookup" if keeps else None)
    limit = default_memory() if memory is None else memory  # what the process holds already counts in the plan
    size = options.prefix_cache_bytes
    if not allows(manifest.geometry, "prefix_cache_bytes"):
        size = 0
    if size is None and manifest.stage.before and options.prefix_cache_folder is None:
        size = 0  # what stages hold would come here over the network
    if size is None:
        spare = available_memory() if memory is None else memory - manifest.memory.total(runner.max_context)
        size = max(0, min(PREFIX_BYTES, spare // (PREFIX_SHARE if memory is None else 1)))
    store = None
    if options.prefix_cache_folder is not None and size:
        store = PrefixStore(
            Path(options.prefix_cache_folder), options.prefix_cache_disk_bytes, pending_bytes=PENDING_BYTES
        )
    cache = runner.session.cache
    form, states = cache.form(BLOCK), None if cache.can_rewind else cache.states_form
    key = prefix_key(manifest, options.determinism, runner.session.exact)
    return Engine(
        runner.session,
        manifest,
        model.tokenizer,
        max_context=runner.max_context,
        prefill_chunk=runner.prefill_chunk,
        options=options,
        memory=limit - (PENDING_BYTES if store else 0),
        prefixes=PrefixCache(key, max_bytes=size, store=store, form=form, states=states) if size else None,
        store=store,
        drafter=make_drafter(model, options),
    )


def prefix_key(manifest: Manifest, level: Determinism, exact: bool) -> str:
    """Everything that cached keys and values depend on: weights, graphs, the cache's type, the shapes of calls, and if
    stages handed on ``exact`` hidden states."""
    hashes = [*manifest.stage.before, *(file.sha256 for _, file in sorted(manifest.files.items()))]
    parts = [manifest.source.fingerprint, manifest.cache, level.value, *([] if exact else ["float16"]), *hashes]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def drafts_keep_bits(manifest: Manifest, level: Determinism) -> bool:
    """Tell whether verified drafts leave the bits of all logits as they are."""
    if not allows(manifest.geometry, "draft"):
        return False
    kept = manifest.graphs["decode"].invariance
    alike = kept.single and kept.rows == 1 and kept.tokens > 0 and kept.outputs == 1
    one_graph = manifest.graphs["prefill"].file == manifest.graphs["decode"].file
    return level is Determinism.STRICT or (level is Determinism.FAST and one_graph and alike)


def make_drafter(model: Model, options: EngineOptions) -> Drafter | None:
    """The drafter that the options ask for: none, prompt lookup, or a second bundle with the same tokenizer, of a model
    or a draft head."""
    if options.draft is None:
        return None
    if options.draft == "lookup":
        return PromptLookup()
    draft = load(options.draft, threads=model.threads, self_test=False)
    try:
        refuse(draft.manifest.geometry, "drafting")
        borrows = draft.manifest.geometry.borrows
        kind = AssistantDrafter if borrows else HeadDrafter if draft.manifest.geometry.head else ModelDrafter
        return kind(draft, model)
    except BaseException:
        draft.close()
        raise
