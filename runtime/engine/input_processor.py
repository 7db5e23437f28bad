"""Prepare requests: check them, and make their tokens, samplers and branches."""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.bundle import Manifest
from llmc.errors import ContextError, RequestError, UsageError, format_value
from llmc.runtime.api.handle import OutputCollector
from llmc.runtime.api.request import Request
from llmc.runtime.api.results import Output
from llmc.runtime.engine.branch import SINK_TOKENS, RequestState
from llmc.runtime.engine.diffusion_group import Diffused, DiffusedGroup, check_request
from llmc.runtime.engine.sample_group import Sample, SampleGroup
from llmc.runtime.engine.search_group import SearchGroup
from llmc.runtime.guided.guide import CompiledGrammar, GrammarGuide
from llmc.runtime.observe.metrics import EngineMetrics
from llmc.runtime.sampling.dry import Breakers
from llmc.runtime.sampling.params import GUIDES, SamplingParams
from llmc.runtime.sampling.processors import Guide, SamplingContext, build_processors
from llmc.runtime.sampling.samplers import make_sampler
from llmc.runtime.search.beam import BeamSearch, Hypothesis, StopCriterion
from llmc.runtime.sessions.adapters import Adapters
from llmc.runtime.speculation.speculator import Speculator
from llmc.runtime.text.detokenizer import NoText, TextStream, decode_all
from llmc.runtime.text.tokenizer import PLAIN_CHARACTERS, Tokenizer
from llmc.runtime.tools.thinking import ThinkingGuide

if TYPE_CHECKING:
    from llmc.runtime.guided.grammars import Grammars

# Below it, the half of the context that stays would hardly be more than the sinks.
SHORTEST_SLIDING = 4 * SINK_TOKENS
# Characters of a text in which its first tokens are looked for, where its middle is dropped.
SINK_CHARACTERS = 1024


class InputProcessor:
    """Prepare requests for a model, on any thread; ``speculate`` makes a sample's speculator by key and scope."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        max_context: int,
        max_rows: int,
        adapters: Adapters,
        speculate: Callable[[int], Speculator] | None = None,
    ) -> None:
        self._adapters = adapters
        self._speculate = speculate
        self.max_context = max_context
        self.max_rows = max_rows
        self._tokenizer = tokenizer
        self._vocab_size = manifest.geometry.vocab_size
        self._eos = tuple(manifest.generation.eos_token_ids)
        self._diffusion = manifest.geometry.diffusion

    @cached_property
    def _grammars(self) -> "Grammars":
        """Imported for the first request that wants a form, for that takes a while."""
        from llmc.runtime.guided.grammars import Grammars

        return Grammars(self._tokenizer, self._vocab_size, self._eos)

    def process(self, request: Request, collector: OutputCollector, metrics: EngineMetrics) -> RequestState:
        """The state of a request. Called in the client's thread, for grammars may take a second to compile.

        Raises:
            RequestError, UsageError, GrammarError: the request cannot be served.
        """
        params = request.params
        if params.seed is None and draws(params):
            params = replace(params, seed=secrets.randbits(64))
        self._check(request)
        adapter = self._adapters.find(request.adapter)
        ids = self._ids(request)
        prompt, cut = fit_prompt(ids, params, self.max_context)
        if params.num_beams > self.max_rows:
            raise RequestError(
                f"{format_value(params.num_beams)} rows are needed at once (beams), the engine has "
                f"{self.max_rows}; ask for fewer, or load with a larger max_batch (build with a larger --max-batch)"
            )
        guided = any(getattr(params, name) is not None for name in GUIDES)
        grammar = self._grammars.compile_grammar(params, request.deadline_s) if guided else None
        state = RequestState(request, params, prompt, collector, metrics.timeline(len(prompt)), adapter)
        state.truncated_tokens = cut
        state.group = self._make_group(state, grammar)
        return state

    def _make_group(self, state: RequestState, grammar: CompiledGrammar | None) -> SampleGroup | SearchGroup:
        params = state.params
        context = SamplingContext(
            params,
            self._vocab_size,
            len(state.prompt),
            self._eos,
            state.request.logits_processors,
            breakers=Breakers(params.dry_sequence_breakers, self._tokenizer.spell),
            bad_words=self._bad_words(params),
        )
        if params.num_beams == 1:
            kind = SampleGroup if self._diffusion is None else DiffusedGroup
            return kind(state, partial(self._sample, grammar=grammar, context=context))
        search = BeamSearch(
            num_beams=params.num_beams,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            num_return_sequences=params.num_return_sequences or 1,
            max_tokens=params.max_tokens,
            eos_token_ids=self._ends(params),
            processors=build_processors(context),
            stops=self._stops(state.request),
        )
        return SearchGroup(state, search, params.num_beams, partial(self._make_output, state.request))

    def _sample(
        self, group: SampleGroup, index: int, grammar: CompiledGrammar | None, context: SamplingContext
    ) -> Sample:
        params = group.request.params
        guide: Guide | None = None if grammar is None else GrammarGuide(grammar)
        if group.request.request.thinking is not None:
            guide = ThinkingGuide(group.request.request.thinking, self._tokenizer, self._eos, guide)
        sampler = make_sampler(replace(context, guide=guide), index)
        text: TextStream = NoText()
        if params.detokenize:
            shown = group.request.request.shown_tokens
            text = TextStream(self._tokenizer, params.stop, keep_stop=params.include_stop_str_in_output, shown=shown)
        if self._diffusion is not None:
            return Diffused(self._diffusion, group, index, sampler, text, self._ends(params))
        speculate = None if params.speculate is False else self._speculate
        return Sample(group, index, sampler, text, self._ends(params), guide, speculate)

    def _check(self, request: Request) -> None:
        """Refuse what the request's parts ask for together and cannot have."""
        params = request.params
        check_request(request, self._diffusion)
        if request.thinking is not None and params.num_beams > 1:
            raise UsageError(
                "num_beams",
                f"is {params.num_beams}, and a budget of reasoning and tool calls need samples",
                "leave it out",
            )
        if request.images is not None and params.on_overflow != "refuse":
            raise UsageError(
                "on_overflow", f"is {params.on_overflow}, but no part of an image can be left out", "set it to refuse"
            )
        if request.images is not None and request.images.whole and params.prompt_logprobs is not None:
            raise UsageError(
                "prompt_logprobs", "are asked for of a prompt whose images are fed whole", "leave them out"
            )
        if params.speculate and self._speculate is None:
            raise UsageError("speculate", "is True, but the engine has no drafts", "load with draft='lookup'")

    def _stops(self, request: Request) -> StopCriterion | None:
        """The request's stopping criteria as searches see them: of the new tokens."""
        criteria = request.stopping_criteria
        if not criteria:
            return None
        detokenize = request.params.detokenize

        def stop(tokens: Sequence[int]) -> bool:
            text = self._tokenizer.decode(tokens) if detokenize else ""
            return any(criterion(tokens, text) for criterion in criteria)

        return stop

    def _make_output(self, request: Request, index: int, found: Hypothesis) -> Output:
        params, tokens = request.params, found.token_ids
        ends = self._ends(params)
        ended = bool(tokens) and tokens[-1] in ends
        shown = tokens[:-1] if ended and not params.include_stop_str_in_output else tokens
        text = decode_all(self._tokenizer, shown, request.shown_tokens) if params.detokenize else ""
        reason = ends[tokens[-1]] if ended else None
        return Output(index, text, tokens, found.finish_reason, score=found.score, stop_reason=reason)

    def _ends(self, params: SamplingParams) -> dict[int, int | None]:
        """The tokens that end an output, each with its stop reason; an end of sequence has none."""
        own = {token: token for token in params.stop_token_ids}
        return {**own, **dict.fromkeys(() if params.ignore_eos else self._eos)}

    def _ids(self, request: Request) -> list[int]:
        prompt, special = request.prompt, request.add_special_tokens
        if isinstance(prompt, str):
            encode = partial(self._tokenizer.encode, add_special_tokens=special)
            ids = text_tokens(self._tokenizer, prompt, encode, self.max_context, request.params.on_overflow)
        else:
            ids = token_ids(prompt)
        if not ids:
            raise RequestError(
                "the prompt is empty: it has no tokens", "give at least one character", parameter="prompt"
            )
        check_tokens("prompt", ids, self._vocab_size)
        for name in ("stop_token_ids", "banned_tokens", "allowed_tokens"):
            check_tokens(name, getattr(request.params, name) or (), self._vocab_size)
        for word in request.params.bad_words:
            check_tokens("bad_words", () if isinstance(word, str) else word, self._vocab_size)
        check_tokens("logit_bias", [token for token, _ in request.params.logit_bias], self._vocab_size)
        return ids

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The tokens of each of the words: of a text with a space before it and without."""
        given = [word.lstrip(" ") for word in params.bad_words if isinstance(word, str)]
        texts = [text for word in given for text in (word, " " + word) if text]
        words = [ids for text in texts if (ids := self._tokenizer.encode(text, add_special_tokens=False))]
        return words + [list(word) for word in params.bad_words if not isinstance(word, str)]


def draws(params: SamplingParams) -> bool:
    """True if anything is left to chance."""
    return params.num_beams == 1 and params.temperature > 0


def text_tokens(
    tokenizer: Tokenizer, text: str, encode: Callable[[str], list[int]], max_context: int, on_overflow: object
) -> list[int]:
    """Token ids of a text, without tokenizing what :func:`fit_prompt` cannot keep: tokens take 100 times a text's
    memory. ContextError if they are more than the context, and ``on_overflow`` lets nothing be left out.
    """
    advice = "shorten it, or set on_overflow to truncate_left or sink"
    # Less than this is read anyway, and the longest token need not be known.
    most = max_context * (tokenizer.longest_token if len(text) > PLAIN_CHARACTERS * max_context else len(text))
    if on_overflow not in ("truncate_left", "sink"):
        if len(text) > most:
            raise ContextError(
                f"the prompt has {len(text)} characters, a context of {max_context} tokens holds at most {most}",
                advice,
                parameter="prompt",
            )
        ids, read = tokenizer.encode_within(text, max_context, encode)
        if read < len(text):
            raise ContextError(
                f"the prompt has {len(text)} characters, of which the first {read} are some {len(ids)} tokens already, "
                f"which leaves no room in a context of {max_context}",
                advice,
                parameter="prompt",
            )
        return ids
    ids, read = tokenizer.encode_within(text[-most:], max_context, encode, from_end=True)
    if read == len(text) or on_overflow == "truncate_left":
        return ids
    return [*encode(text[:SINK_CHARACTERS])[:SINK_TOKENS], *ids]


def fit_prompt(ids: list[int], params: SamplingParams, max_context: int) -> tuple[list[int], int]:
    """The prompt as it will be fed, and how many tokens were left out, by ``params.on_overflow``.

    Raises:
        ContextError: prompt and new tokens exceed the context, and nothing may be left out.
    """
    room = max_context - params.max_tokens
    if len(ids) <= room:
        return ids, 0
    if params.on_overflow == "truncate_left" and room > 0:
        return ids[-room:], len(ids) - room
    if params.on_overflow == "sink" and max_context >= SHORTEST_SLIDING:
        if len(ids) < max_context:
            return ids, 0
        kept = max_context // 2
        return [*ids[:SINK_TOKENS], *ids[len(ids) - kept + SINK_TOKENS :]], len(ids) - kept
    rest = max_context - len(ids)
    if rest <= 0:
        raise ContextError(
            f"the prompt has {len(ids)} tokens, which leaves no room in a context of {max_context}",
            "shorten it, set on_overflow to truncate_left or sink, or build with a larger --max-context if the model "
            "allows it",
            parameter="prompt",
        )
    raise ContextError(
        f"the prompt has {len(ids)} tokens and {format_value(params.max_tokens)} new ones are asked for, but the "
        f"context holds {max_context}",
        f"ask for at most {rest}, set on_overflow to truncate_left or sink, or build "
        f"with a larger --max-context if the "
        "model allows it",
        parameter="prompt",
    )


def token_ids(prompt: object) -> list[int]:
    """Token ids as plain integers; UsageError for anything else, such as floats, which numpy would convert silently."""
    if isinstance(prompt, bytes | bytearray):
        raise UsageError("prompt", "is bytes, expected text or token ids", "decode it first")
    listed = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, memoryview)
    ids: list[Any] = list(prompt) if listed else [None]  # type: ignore[call-overload]
    if {*map(type, ids)} == {int}:  # nearly always
        return ids
    if not all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in ids):
        raise UsageError("prompt", f"is {format_value(prompt)}, expected text or a list of token ids (integers)")
    return [int(token) for token in ids]


def check_tokens(name: str, tokens: Collection[int], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary with a UsageError."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise UsageError(
            name, f"holds token id {format_value(wrong)}, which is out of range, expected 0 ... {vocab_size - 1}"
        )
