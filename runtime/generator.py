"""A loaded bundle that generates: requests from prompts and messages, and what serves them."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from llmc.bundle import Manifest
from llmc.bundle.model.kinds import allows, refuse
from llmc.errors import EngineClosedError, GrammarError, UsageError, format_value
from llmc.runtime.api.adapters import check_adapters
from llmc.runtime.api.chat import ChatHandle, ChatResult
from llmc.runtime.api.handle import Handle
from llmc.runtime.api.options import EngineOptions
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import GenerationResult
from llmc.runtime.api.transcript import SPARE_TOKENS, Transcript, TranscriptHandle, find_language, make_messages
from llmc.runtime.audio.tower import AudioTower
from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.input_processor import text_tokens
from llmc.runtime.loaded import LoadedBundle
from llmc.runtime.runner.prefill import SingleRunner
from llmc.runtime.sampling.params import GUIDES, SamplingParams
from llmc.runtime.sessions.adapters import AdapterInfo
from llmc.runtime.text.control_tokens import Disguise
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.tools.calls import read_tools
from llmc.runtime.tools.formats import writer
from llmc.runtime.tools.plan import ChatPlan, plan_chat
from llmc.runtime.tools.thinking import marks_of
from llmc.runtime.vision.tower import RowTower, take_images

Messages = Sequence[Mapping[str, Any]]
REQUEST_FIELDS = {field.name for field in fields(Request)} - {"prompt", "params"}


def template_variables(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Check chat_template_kwargs; names with an argument of their own are refused."""
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


class Generator(LoadedBundle):
    """A loaded bundle that generates text. Requests share batches.

    Args:
        runner: runs one sequence at a time, for benchmarks and evaluation; not while requests run.
        make_engine: makes the engine, for the first request.
        options: of the engine.
        tower: computes images or audio; None for a model that takes text alone.
        folder, manifest, tokenizer, threads: see :class:`LoadedBundle`.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        tokenizer: Tokenizer,
        runner: SingleRunner,
        threads: int,
        make_engine: Callable[["Generator"], Engine],
        options: EngineOptions | None = None,
        tower: RowTower[Any] | None = None,
    ) -> None:
        tokenizer.require_spaces(folder)
        super().__init__(folder, manifest, tokenizer, runner.session, threads, runner.max_context)
        self.runner = runner
        self.options = options or EngineOptions()
        self._make_engine = make_engine
        self._tower = tower
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._closed = False

    @property
    def tower(self) -> RowTower[Any]:
        """Images or audio to rows of embeddings. UsageError if the bundle takes text alone."""
        if self._tower is None:
            raise UsageError(
                "messages",
                "holds an image, and the model takes text alone",
                "send text, or take a bundle of a model that sees, exported without --text-only",
            )
        return self._tower

    @property
    def planned_bytes(self) -> int:
        """Bytes that the process needs for it now, by the bundle's plan: with caches as large as they are."""
        cache, engine = self.runner.session.cache, self._engine
        prefixes = 0 if engine is None or engine.prefixes is None else engine.prefixes.bytes
        return self.manifest.memory.total(cache.capacity, max(1, cache.rows)) + prefixes

    @property
    def engine(self) -> Engine:
        """The engine that serves the requests, made when first asked for.

        Raises:
            EngineClosedError: the model is closed.
            DraftError, BundleError: the draft model does not fit or cannot be loaded.
            UsageError: it is of a kind that cannot draft, or the bundle is a draft head.
        """
        with self._lock:
            if self._closed:
                raise EngineClosedError("the model is closed; load the bundle again")
            if self._engine is None:
                self._engine = self._make_engine(self)
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
        tool_format = self.options.tool_format if tool_format is None else tool_format
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

    def transcribe(
        self, audio: Any, *, language: str | None = None, prompt: str | None = None, **sampling: Any
    ) -> Transcript:
        """Write down what is said in ``audio``; takes and raises what :meth:`stream_transcript` does."""
        handle = self.stream_transcript(audio, language=language, prompt=prompt, **sampling)
        return handle.transcript(handle.result())

    def stream_transcript(
        self, audio: Any, *, language: str | None = None, prompt: str | None = None, **sampling: Any
    ) -> TranscriptHandle:
        """Like :meth:`transcribe`, as an iterator of the text.

        Args:
            audio: the path of a WAV, FLAC, Ogg or MP3 file; its bytes; or floats [samples] at the model's rate.
            language: name or ISO 639 code; default: the model recognizes it.
            prompt: names and words that may occur, or the topic.
            sampling: as for :meth:`generate`; ``max_tokens`` follows from the length of the audio by default.

        Raises:
            ContextError: it is too long for the context.
            RequestError: it cannot be decoded.
            UsageError: the model hears nothing, or was not trained with this language.
        """
        part, tower = self.manifest.geometry.audio, self._tower
        if part is None or not isinstance(tower, AudioTower):
            raise UsageError("audio", "is given to a model that hears none", "take a bundle of a model that does")
        name, most = find_language(language), self.engine.max_context
        clip = tower.prepare(audio, "the audio", most)
        beginning = part.opening.replace("{language}", name) if name else ""
        messages = make_messages(clip, prompt, beginning)
        _, ids, clips = self._chat_prompt(messages, False, None, not name, continue_final_message=bool(name))
        rows = tower.compute_rows(clips, ids)
        sampling = {
            "max_tokens": max(1, min(most - len(ids), len(rows.rows) + SPARE_TOKENS)),
            **sampling,
            "images": rows,
        }
        opened = partial(TranscriptHandle, opening=part.opening, language=name, seconds=clip.seconds)
        handle = self.engine.submit(self.request(ids, **sampling), opened)
        handle.owner = self
        return handle

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
        write = writer(self.options.tool_format if tool_format is None else tool_format)
        variables |= {"continue_final_message": continue_final_message, "write": write}
        return self._chat_prompt(messages, parse_special, on_overflow, begins, **variables)[1]

    def _chat_prompt(
        self,
        messages: Messages,
        parse_special: bool,
        on_overflow: str | None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[str, list[int], list[Any]]:
        kinds = () if self._tower is None else (self._tower.kind,)
        tokenizer, (messages, images) = self.tokenizer, take_images(messages, *kinds)
        tower = self.tower if images else None
        disguise = None if parse_special else Disguise(tokenizer.controls)
        from llmc.runtime.text.shown import render_messages  # jinja, for those who chat

        prompt = render_messages(self.chat_template, messages, add_generation_prompt, disguise=disguise, **variables)

        def encode(text: str) -> list[int]:
            # The template writes the special tokens itself.
            return tokenizer.encode_disguised(text, disguise) if disguise else tokenizer.encode(text, False)

        shown, most = tokenizer.controls.unmark(prompt) if disguise else prompt, self.engine.max_context
        seen: list[Any] = []
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
                raise UsageError("on_overflow", "is given with suffix, which drops no text", "leave it out")
            special = own.pop("add_special_tokens", True)
            prompt, ends = self.tokenizer.encode_gap(prompt, suffix, self.engine.max_context, special)
            arguments["stop_token_ids"] = [*(arguments.get("stop_token_ids") or ()), *ends]
        if isinstance(prompt, str):
            encoded = self.tokenizer.encode if parse_special else self.tokenizer.encode_plain
            encode = partial(encoded, add_special_tokens=own.pop("add_special_tokens", True))
            overflow = arguments.get("on_overflow")
            prompt = text_tokens(self.tokenizer, prompt, encode, self.engine.max_context, overflow)
        if arguments.get("max_tokens") is None:  # as many as fit
            room = self.engine.max_context - (len(prompt) if isinstance(prompt, Sized) else 0)
            arguments["max_tokens"] = max(1, min(self.options.default_max_tokens, room))
        return Request(prompt, SamplingParams.from_defaults(self.manifest.generation, **arguments), **own)

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The loaded adapters by name, each with its hash (``sha256``) and ``rank``."""
        return self.engine.adapters.loaded

    def load_adapter(self, name: str, folder: str | Path) -> AdapterInfo:
        """Let requests name an adapter, from a folder that ``llmc adapter add`` wrote, while others run.

        Raises:
            UsageError: the name is taken, or none, or the level of determinism does not hold with adapters.
            ResourceError: as many adapters are loaded, or still used by requests, as the bundle was built for.
            BundleError: it is damaged or does not fit this bundle.
        """
        check_adapters(self.manifest, self.options.determinism)
        return self.engine.adapters.load(name, Path(folder))

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those that have it go on, and its memory is free after the last.

        Raises:
            RequestError: none of that name is loaded.
        """
        self.engine.adapters.unload(name)

    def metric_families(self, labels: Mapping[str, str]) -> Iterator[Any]:
        from llmc.runtime.observe.prometheus import EngineCollector

        return EngineCollector(self.engine.metrics, labels).collect()

    def close(self, drain: bool = False) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._tower is not None:
            self._tower.close()
        if self._engine is not None:
            self._engine.close(drain, then=super().close)
        else:
            super().close()


Model = Generator
"""The name of :class:`Generator` before embedding models had a class of their own."""
