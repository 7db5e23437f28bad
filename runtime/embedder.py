"""Texts to vectors, queries and documents to scores: calls of whole texts, many of them in one."""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import Manifest
from llmc.errors import ContextError, NonFiniteError, RequestError, UsageError, format_value
from llmc.runtime.loaded import LoadedBundle
from llmc.runtime.sampling.ranges import integer
from llmc.runtime.sessions.onnxruntime.stateless import StatelessSession
from llmc.runtime.text.control_tokens import Disguise
from llmc.runtime.text.prompts import Prompts
from llmc.runtime.text.tokenizer import Tokenizer

Tokens = Sequence[int]


class TypedTokens(list[int]):
    """Token ids of a query with a document, and the type of each."""

    def __init__(self, ids: Tokens, types: Tokens) -> None:
        super().__init__(ids)
        self.types = types


Vectors = NDArray[np.float32]
# Least length that a vector is divided by; a vector of zeros stays one.
SHORTEST = 1e-12
# Times that a document is cut shorter: the tokens of its last characters depend on the text after them.
MOST_CUTS = 8


# A model's work by its result, for messages.
ABILITIES = {
    "embeddings": "embeds texts (llmc embed, Embedder.embed)",
    "scores": "ranks documents (llmc rank, Embedder.rank)",
}


class Embedder(LoadedBundle):
    """A loaded bundle that embeds or ranks texts. Calls take turns."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        tokenizer: Tokenizer,
        session: StatelessSession,
        threads: int,
        max_context: int,
    ) -> None:
        assert manifest.geometry.encoder is not None
        super().__init__(folder, manifest, tokenizer, session, threads, max_context)
        self._form = manifest.geometry.encoder
        self._call_tokens = manifest.limits.prefill_chunk
        self._prompts = Prompts.from_folder(folder)
        self._lock = threading.Lock()

    @property
    def width(self) -> int:
        """Values of a result."""
        return self._form.width

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """Names of the checkpoint's prompts, such as ``query`` and ``document``."""
        return tuple(self._prompts.named)

    def embed(
        self,
        texts: Sequence[str],
        *,
        dimensions: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> Vectors:
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
        self._check("embeddings", "embed")
        width = self.vector_width(dimensions)
        return self.cut(self.encode(self.text_tokens(texts, instruction=instruction, truncate=truncate)), width)

    def rank(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None, truncate: bool = False
    ) -> Vectors:
        """Scores of documents for a query, float32 [n] in the order given; the higher the better: logits, or after a
        sigmoid.

        Args:
            query: the question.
            documents: any number of texts.
            instruction: a prompt's name or the task in words; default: the checkpoint's.
            truncate: leave out the end of what is too long, which is refused by default: of a document, and without a
                chat template of the longer one of query and document.

        Raises:
            UsageError: the bundle does not rank, or an argument is of another type.
            RequestError: a text is too long or no valid text, or the chat template fails.
        """
        self._check("scores", "rank")
        return self.encode(self.pair_tokens(query, documents, instruction=instruction, truncate=truncate))[:, 0]

    def vector_width(self, dimensions: int | None) -> int:
        """Values of the vectors that a request gets; UsageError if it asks for more than there are, or for none."""
        width = dimensions if dimensions is not None else min(self._prompts.dimensions or self.width, self.width)
        integer(1, self.width).check("dimensions", width)
        return width

    def cut(self, vectors: Vectors, width: int) -> Vectors:
        """The first values of each vector, made of length one again where the checkpoint normalises."""
        vectors = vectors[:, :width]
        if width == self.width or not self._form.normalized:
            return vectors
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.maximum(lengths, np.float32(SHORTEST))
        return vectors

    def text_tokens(self, texts: Sequence[str], *, instruction: str | None, truncate: bool) -> list[list[int]]:
        """Token ids of texts to embed, as :meth:`embed` makes them."""
        prefix = self._prompts.prefix(instruction)
        return [self._tokens(prefix + text, truncate) for text in _check_texts("texts", texts)]

    def check_token_ids(self, rows: Sequence[Tokens], *, truncate: bool) -> list[list[int]]:
        """Token ids that a client made itself; RequestError for ids that are none of the model's, too many, or none."""
        size = self.tokenizer.vocab_size
        for ids in rows:
            if (wrong := next((token for token in ids if not 0 <= token < size), None)) is not None:
                raise RequestError(f"a text holds the token {wrong}, expected ids from 0 to {size - 1}")
            if len(ids) > self.max_context and not truncate:
                raise self._too_long(ids)
        return [self._strip_padding(list(ids[: self.max_context])) for ids in rows]

    def pair_tokens(
        self, query: str, documents: Sequence[str], *, instruction: str | None, truncate: bool
    ) -> list[list[int]]:
        """Token ids of a query with each document, as :meth:`rank` makes them."""
        (query,), documents = _check_texts("query", [query]), _check_texts("documents", documents)
        prompt = self._prompts.prefix(instruction)
        first = prompt + query
        read = self.tokenizer.encode_within(first, self.max_context, self.tokenizer.encode)[1]
        if read < len(first) and (self._form.template or not truncate):
            raise ContextError(
                f"the query leaves no room for a document in {self.max_context} tokens",
                "shorten it",
                parameter="prompt",
            )
        tokens = partial(self._render, prompt, query) if self._form.template else partial(self._pair, first[:read])
        return [tokens(document, truncate) for document in documents]

    def encode(self, rows: Sequence[Tokens]) -> Vectors:
        """Results float32 [n, width] of token sequences, in their order. Sequences of like lengths share calls.
        Raises NonFiniteError: the model computed NaN or infinite values."""
        results = np.empty((len(rows), self.width), np.float32)
        for group in self._groups(rows):
            longest = len(rows[group[0]])
            ids = np.zeros((len(group), longest), np.int64)
            for row, place in zip(ids, group, strict=True):
                row[: len(rows[place])] = rows[place]
            lengths = np.array([len(rows[place]) for place in group], np.int64)
            feeds = {"input_ids": ids, "lengths": lengths}
            if self._form.types:
                feeds["token_types"] = types = np.zeros_like(ids)
                for row, place in zip(types, group, strict=True):
                    if isinstance(tokens := rows[place], TypedTokens):
                        row[: len(tokens)] = tokens.types
            with self._lock:  # memory is planned for one call at a time
                results[group] = self._session.run(**feeds).reshape(len(group), self.width)
        if not np.isfinite(results).all():
            raise NonFiniteError("the model's results hold NaN or infinite values; run: llmc verify BUNDLE")
        return results

    def _groups(self, rows: Sequence[Tokens]) -> Iterator[list[int]]:
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
        while order:
            count = max(1, self._call_tokens // len(rows[order[0]]))
            yield order[:count]
            order = order[count:]

    def _check(self, result: str, verb: str) -> None:
        if self._form.result != result:
            ability = ABILITIES[str(self._form.result)]
            raise UsageError("bundle", f"{ability}, so it cannot {verb}", "use the other verb or another bundle")

    def _tokens(self, text: str, truncate: bool) -> list[int]:
        ids, read = self.tokenizer.encode_within(text, self.max_context, self.tokenizer.encode)
        if read < len(text) or len(ids) > self.max_context:
            ids, _ = self._cut(ids, truncate, text[:read])
        return self._strip_padding(ids)

    def _pair(self, query: str, document: str, truncate: bool) -> list[int]:
        _, read = self.tokenizer.encode_within(document, self.max_context, self.tokenizer.encode)
        ids, types = self.tokenizer.encode_cut(query, None, document[:read])
        if read < len(document) or len(ids) > self.max_context:
            ids, types = self._cut(ids, truncate, query, document[:read])
        ids = self._strip_padding(ids)
        return TypedTokens(ids, types[: len(ids)])

    def _cut(self, ids: list[int], truncate: bool, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """As many tokens of a text, or of two, as there is room for, and their types.
        RequestError: none may be left out."""
        if not truncate:
            raise self._too_long(ids)
        return self.tokenizer.encode_cut(text, self.max_context, pair)

    def _too_long(self, ids: Tokens) -> ContextError:
        return ContextError(
            f"a text has {len(ids)} tokens or more, at most {self.max_context} are expected",
            "shorten it, set truncate to leave its end out, or load with a larger max_context (build with a larger "
            "--max-context)",
            parameter="prompt",
        )

    def _render(self, prompt: str, query: str, document: str, truncate: bool) -> list[int]:
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        alone, read = self.tokenizer.encode_within(document, self.max_context, encode)
        room, shown = len(alone), document[:read]
        for _ in range(MOST_CUTS):
            ids = self._message_tokens(prompt, query, shown)
            if len(ids) <= self.max_context and (truncate or shown == document):
                return self._strip_padding(ids)
            if not truncate:
                raise self._too_long(ids)
            room -= max(1, len(ids) - self.max_context)
            if room < 0:
                break
            shown = self.tokenizer.decode(alone[:room], skip_special_tokens=False).rstrip("\ufffd")
        raise ContextError(
            f"the query leaves no room for a document in {self.max_context} tokens", "shorten it", parameter="prompt"
        )

    def _strip_padding(self, ids: list[int]) -> list[int]:
        end = next((end for end in range(len(ids), 0, -1) if ids[end - 1] != self._form.padding), 0)
        if not end:
            raise RequestError("a text has no tokens, so nothing can be said of it; leave it out")
        return ids[:end]

    def _message_tokens(self, prompt: str, query: str, document: str) -> list[int]:
        disguise = Disguise(self.tokenizer.controls)
        messages = [{"role": "system", "content": prompt}] if prompt else []
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        text = self.chat_template.render(messages, False, disguise=disguise)
        return self.tokenizer.encode_disguised(text, disguise)


def _check_texts(name: str, texts: Any) -> list[str]:
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise UsageError(name, f"is {format_value(texts)}, expected a list of texts")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise UsageError(name, f"holds {format_value(wrong[0])}, expected texts")
    return list(texts)
