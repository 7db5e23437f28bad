"""What tests of the runtime share: tokenizers of two kinds, and an engine on a session without a model.

The session's logits depend on every token that a row holds, so a lost, doubled or misplaced position shows in the
tokens of the request.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.null_cuda import compile_library
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from llmc.bundle import Invariance, Limits, Manifest
from llmc.runtime.api.options import EngineOptions
from llmc.runtime.engine.engine import Engine
from llmc.runtime.kv.cache import KVCache
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.processors import SamplingContext
from llmc.runtime.sampling.samplers import make_sampler
from llmc.runtime.sessions import Batch
from llmc.runtime.text import tokenizer as llmc_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def f(x):\n    return x + 1\n",
    "naïve café 北京 🎉🎉 123",
] * 20


@pytest.fixture(scope="session")
def null_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CUDA without a device, a folder for a child's LD_LIBRARY_PATH."""
    return compile_library(tmp_path_factory.mktemp("null_cuda")) or pytest.skip("no C compiler is here")


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE as in Llama 3 and Qwen: every byte has a token; special tokens only by name."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return save(tmp_path_factory.mktemp("byte_level"), tokenizer, {"eos_token": "<|end|>", "pad_token": "<|end|>"})


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BPE on words that begin with a visible space, bytes for what it does not know and BOS, as in Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        [text.encode("ascii", "ignore").decode() for text in CORPUS],
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False),
    )
    return save(tmp_path_factory.mktemp("metaspace"), with_bytes_as_plain_tokens(tokenizer), LLAMA_CONFIG)


LLAMA_CONFIG = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"}


def with_bytes_as_plain_tokens(trained: Tokenizer) -> Tokenizer:
    """The trainer makes every token it is given special; only the first three are."""
    content = json.loads(trained.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


# ------------------------------------------------------------------------------------------- a session without a model

VOCAB = 4096
EOS = (0, 2)
EMPTY = -1  # a position that nobody has written


class Tokens:
    """A KV cache that holds a token for each position; tests look at them with ``cache[row, start:end]``."""

    can_rewind = True
    device_memory: int | None = None
    grow = KVCache.grow
    read_blocks = KVCache.read_blocks

    def __init__(self) -> None:
        self.tokens = np.full((0, 0), EMPTY, np.int64)

    def __getitem__(self, place: Any) -> np.ndarray:
        return self.tokens[place]

    def __setitem__(self, place: Any, tokens: Any) -> None:
        self.tokens[place] = tokens

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]

    def reserve(self, rows: int, capacity: int) -> None:
        grown = np.full((max(rows, self.rows), max(capacity, self.capacity)), EMPTY, np.int64)
        grown[: self.rows, : self.capacity] = self.tokens
        self.tokens = grown

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self.check(source, start, end)
        self.check(target, start, end)
        self.tokens[target, start:end] = self.tokens[source, start:end]

    def read(self, row: int, start: int, end: int) -> np.ndarray:
        self.check(row, start, end)
        return self.tokens[row, start:end].copy()

    def write(self, row: int, start: int, end: int, values: np.ndarray) -> None:
        self.check(row, start, end)
        self.tokens[row, start:end] = values

    def swap(self, one: int, its_end: int, other: int, others_end: int) -> None:
        self.check(one, 0, its_end)
        self.check(other, 0, others_end)
        self.tokens[[one, other]] = self.tokens[[other, one]]

    def release(self, row: int) -> None:
        pass

    def can_resume(self, row: int, position: int) -> bool:
        return self.can_rewind

    def is_overdue(self, row: int, end: int) -> bool:
        return False

    def let_go(self, row: int, end: int) -> None:
        pass

    def whole_from(self, row: int) -> int:
        return 0

    def check(self, row: int, start: int, end: int) -> None:
        assert 0 <= row < self.rows and 0 <= start <= end <= self.capacity, (row, start, end, self.tokens.shape)


class Remembering:
    """A session whose cache holds tokens, and whose logits are a hash of them.

    Attributes:
        calls: every call so far.
        before: called with each batch before it runs; may wait or raise.
        spoil: given the tokens of a row, says whether its logits shall be NaN.
        leak: how much of its neighbour's logits a row gets: the error that tests of determinism have to notice.
        packs_rows, turns: as a real session's; padding is then never written.
    """

    engine_version = "0"
    packs_rows = False
    turns = 1
    exact = True
    cache_type = Tokens

    def __init__(self) -> None:
        self.cache = self.cache_type()
        self.calls: list[Batch] = []
        self.before: Callable[[Batch], object] = lambda _: None
        self.spoil: Callable[[list[int]], bool] = lambda _: False
        self.leak = 0.0
        self.closed = False

    def run(self, batch: Batch) -> np.ndarray:
        self.before(batch)
        self.calls.append(batch)
        rows, new = batch.input_ids.shape
        for row, (past, count) in enumerate(zip(batch.past_lengths.tolist(), batch.counts, strict=True)):
            self.cache.check(batch.first_row + row, 0, past + new)
            self.cache[batch.first_row + row, past : past + count] = batch.input_ids[row, :count]
        prefixes = [
            [
                self.cache[batch.first_row + row, : batch.past_lengths[row] + i + 1].tolist()
                for i in batch.logit_indices[row]
            ]
            for row in range(rows)
        ]
        shape = (*batch.logit_indices.shape, -1) if batch.logit_indices.size else (*batch.logit_indices.shape, VOCAB)
        logits = np.array([[self.logits(tokens) for tokens in row] for row in prefixes], np.float32).reshape(shape)
        if self.leak and rows > 1:
            logits += self.leak * np.roll(logits, 1, axis=0)
        return logits

    def run_ranked(self, batch: Batch) -> np.ndarray:
        return self.run(batch)

    def logits(self, tokens: list[int]) -> np.ndarray:
        return np.full(VOCAB, np.nan, np.float32) if self.spoil(tokens) else logits_of(tokens)

    def close(self) -> None:
        self.closed = True


class Both(Tokens):
    """The caches of two stages; ``first`` is that of the one before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Tokens()

    def reserve(self, rows: int, capacity: int) -> None:
        super().reserve(rows, capacity)
        self.first.reserve(rows, capacity)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        super().copy(source, target, start, end)
        self.first.copy(source, target, start, end)

    def write(self, row: int, start: int, end: int, values: np.ndarray) -> None:
        super().write(row, start, end, values)
        self.first.write(row, start, end, values)

    def swap(self, one: int, its_end: int, other: int, others_end: int) -> None:
        super().swap(one, its_end, other, others_end)
        self.first.swap(one, its_end, other, others_end)


class InStages(Remembering):
    """The same in stages, of which those before the last compute a call when it is begun; it then has to be of the rows
    and the tokens that the last one finds."""

    turns = 3
    cache_type: type[Any] = Both

    def begin(self, batch: Batch) -> Batch:
        return replace(batch, begun=self.compute(batch, self.cache.first))

    def run(self, batch: Batch) -> np.ndarray:
        found = self.compute(batch, self.cache.first) if batch.begun is None else batch.begun
        logits = super().run(batch)
        assert found == self.compute(batch, self.cache), "the last stage has other rows than those before it"
        return logits

    @staticmethod
    def compute(batch: Batch, cache: Tokens) -> list[list[int]]:
        """Write a call's tokens into the cache; what its rows then hold."""
        found = []
        for i, (past, new) in enumerate(zip(batch.past_lengths.tolist(), batch.counts, strict=True)):
            cache[batch.first_row + i, past : past + new] = batch.input_ids[i, :new]
            found.append(cache[batch.first_row + i, : past + new].tolist())
        return found


def hash_of(tokens: Sequence[int]) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(np.array(tokens, np.int64).tobytes()))


def logits_of(tokens: Sequence[int]) -> np.ndarray:
    """Logits [V] after ``tokens``."""
    assert EMPTY not in tokens, "a position was read that nobody wrote"
    return hash_of(tokens).standard_normal(VOCAB, np.float32) * 3


@pytest.fixture
def remembering() -> type[Remembering]:
    return Remembering


@pytest.fixture
def in_stages() -> type[InStages]:
    return InStages


@pytest.fixture(scope="session")
def alone() -> Callable[..., list[int]]:
    """The tokens of a sample on the session above, drawn without engine, batch, cache or speculation."""

    def tokens_of(prompt: Sequence[int], params: SamplingParams, index: int = 0) -> list[int]:
        ends = () if params.ignore_eos else EOS
        sampler = make_sampler(SamplingContext(params, VOCAB, prompt_length=len(prompt), eos_token_ids=EOS), index)
        tokens = list(prompt)
        while len(tokens) - len(prompt) < params.max_tokens:
            tokens.append(sampler(logits_of(tokens), tokens).token)
            if tokens[-1] in ends or tokens[-1] in params.stop_token_ids:
                break
        return tokens[len(prompt) :]

    return tokens_of


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_checkpoint: Path) -> llmc_tokenizer.Tokenizer:
    return llmc_tokenizer.Tokenizer.from_folder(tiny_checkpoint)


@pytest.fixture(scope="session")
def served(manifest: Manifest) -> Manifest:
    """The manifest of a bundle that :class:`Remembering` stands for."""
    return replace(
        manifest,
        geometry=replace(manifest.geometry, vocab_size=VOCAB),
        generation=replace(manifest.generation, eos_token_ids=EOS),
        limits=Limits(512, 8, 128),
        graphs={
            name: replace(graph, invariance=Invariance(rows=2, tokens=2, outputs=1))
            for name, graph in manifest.graphs.items()
        },
    )


@pytest.fixture
def make_engine(served: Manifest, tiny_tokenizer: llmc_tokenizer.Tokenizer) -> Iterator[Callable[..., Engine]]:
    """Makes engines on :class:`Remembering`, closed when the test ends; options are those of Engine and its options."""
    engines: list[Engine] = []

    def make(session: Remembering | None = None, *, prefix_bytes: int = 0, **options: Any) -> Engine:
        own = {"max_context", "prefill_chunk", "memory", "drafter"}
        named = {name: options.pop(name) for name in own & options.keys()}
        engine = Engine(
            session or Remembering(),
            served,
            tiny_tokenizer,
            **{"max_context": 256, "prefill_chunk": 32, "memory": 1 << 40, **named},
            options=EngineOptions(**options),
            prefixes=PrefixCache("remembered", block=4, max_bytes=prefix_bytes) if prefix_bytes else None,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
