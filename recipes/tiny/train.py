"""Train a Qwen3-style model of 5.8 million parameters on the source of Python's standard library.

The result is an ordinary Hugging Face checkpoint, small enough to commit, with real weights: quantization, caching and
sampling can be tested on text that the model did not see.
"""

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).resolve().parent
END, START_OF_TURN, END_OF_TURN = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Skipped: tests, generated tables, and files about one machine's build of Python.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
HELD_OUT = 20  # one file in this many is kept for validation
VALIDATION_TEXT_LENGTH = 80_000  # characters
CALIBRATION_TEXT_LENGTH = 130_000  # characters
LONGEST_CHOSEN_FILE = 16_000  # so that these texts mix several files

# Qwen2's split: contractions, words with one leading mark, single digits, punctuation, line ends, blanks.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONTEXT = 2048
TOKENS_PER_STEP = 4096
LENGTHS = (512,) * 7 + (CONTEXT,)  # by step, in turn: mostly short for speed, sometimes the whole context
LEARNING_RATE = 4e-3
WARMUP = 0.06  # of all steps
PROMPTS = ("import os\n", "class Foo(", "    for i in range(")


@dataclass(frozen=True)
class Corpus:
    """Source files by name, split by a hash of the name, so that the split does not depend on order."""

    train: dict[str, str]
    validation: dict[str, str]
    sha256: str

    @classmethod
    def of_standard_library(cls) -> "Corpus":
        root = Path(sysconfig.get_path("stdlib"))
        names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py") if is_wanted(p.relative_to(root)))
        files = {name: (root / name).read_text(encoding="utf-8") for name in names}
        digest = hashlib.sha256("".join(f"{name}\0{text}\0" for name, text in files.items()).encode())
        train = {name: text for name, text in files.items() if hash_of(name) % HELD_OUT}
        validation = {name: text for name, text in files.items() if name not in train}
        return cls(train, validation, digest.hexdigest())

    def texts(self) -> dict[str, dict[str, str]]:
        """Choose whole files for the committed texts: held-out files for evaluation, others for calibration."""
        return {
            "validation": choose_files(self.validation, VALIDATION_TEXT_LENGTH),
            "calibration": choose_files(self.train, CALIBRATION_TEXT_LENGTH),
        }


def choose_files(files: dict[str, str], length: int) -> dict[str, str]:
    """Take whole short files until they would exceed a length in characters."""
    short = {name: files[name] for name in sorted(files, key=hash_of) if 0 < len(files[name]) <= LONGEST_CHOSEN_FILE}
    ends = accumulate(map(len, short.values()))
    return {name: short[name] for name, end in zip(short, ends, strict=True) if end <= length}


def is_wanted(path: Path) -> bool:
    return not any(part in SKIPPED_FOLDERS or part.startswith(SKIPPED_PREFIXES) for part in path.parts)


def hash_of(name: str) -> int:
    """A hash of a file name that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that can encode any bytes."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=to_bytes.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START_OF_TURN, END_OF_TURN],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def model_config() -> Qwen3Config:
    """The model's config: a quarter of Qwen3-0.6B's width and a fifth of its depth."""
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def token_stream(tokenizer: Any, texts: list[str]) -> Tensor:
    """The documents' tokens, each followed by END: (tokens,)."""
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for document in documents for token in (*document, tokenizer.eos_token_id)])


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each token given the earlier ones, for rows (B, S + 1)."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits  # (B, S, V)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def make_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms, with one learning rate."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": [embedding], "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
            lr=LEARNING_RATE,
            betas=(0.9, 0.95),
        ),
    ]


def schedule(step: int, steps: int) -> float:
    """Scale the learning rate: linear warm-up, then half a cosine to zero."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train(model: Qwen3ForCausalLM, stream: Tensor, steps: int) -> float:
    """Train on random windows of the stream; return the loss smoothed over about the last 50 steps, in nats."""
    optimizers = make_optimizers(model)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: schedule(step, steps)) for o in optimizers]
    smoothed, began = math.log(model.config.vocab_size), time.monotonic()
    model.train()
    for step in range(steps):
        length = LENGTHS[step % len(LENGTHS)]
        starts = torch.randint(len(stream) - length, (TOKENS_PER_STEP // length, 1))
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, stream[starts + torch.arange(length + 1)])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad()
        smoothed += max(0.02, 1 / (step + 1)) * (loss.item() - smoothed)
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}/{steps}  loss {smoothed:.3f}  {time.monotonic() - began:.0f} s", flush=True)
    return smoothed


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    stops = tokenizer.convert_tokens_to_ids([END, END_OF_TURN])
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[0])  # type: ignore[no-untyped-call]
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.inference_mode()
def evaluate(model: nn.Module, tokenizer: Any, texts: list[str]) -> dict[str, float]:
    stream = token_stream(tokenizer, texts)
    rows = [stream[None, start : start + CONTEXT + 1] for start in range(0, len(stream) - 1, CONTEXT)]  # (1, S + 1)
    nats = sum(loss_of(model, row).item() * (row.shape[1] - 1) for row in rows)
    bits_per_byte = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    perplexity = math.exp(nats / (len(stream) - 1))
    return {"tokens": len(stream), "perplexity": round(perplexity, 3), "bits_per_byte": round(bits_per_byte, 4)}


def continuation(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**ids, max_new_tokens=64, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens))


def report_on(checkpoint: Path, corpus: Corpus) -> dict[str, Any]:
    """Evaluate the saved weights, in float32, on the held-out files."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    chosen = corpus.texts()
    text = chosen["validation"]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "corpus_sha256": corpus.sha256,
        "corpus_files": len(corpus.train) + len(corpus.validation),
        "validation_files": len(corpus.validation),
        "validation": evaluate(model, tokenizer, list(corpus.validation.values())),
        "validation_text_files": list(text),
        "validation_text": evaluate(model, tokenizer, list(text.values())),
        "calibration_text_files": list(chosen["calibration"]),
        "greedy_continuations": {prompt: continuation(model, tokenizer, prompt) for prompt in PROMPTS},
    }


def run(output: Path, steps: int, threads: int, seed: int) -> None:
    """Train tokenizer and model, then write checkpoint/, training.json and the two texts into ``output``."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    corpus = Corpus.of_standard_library()
    texts, config = list(corpus.train.values()), model_config()
    tokenizer = train_tokenizer(texts, config.vocab_size)
    stream, model = token_stream(tokenizer, texts), Qwen3ForCausalLM(config)
    print(f"{model.num_parameters()} parameters, {len(stream)} training tokens, corpus {corpus.sha256}", flush=True)

    began, cpu_began = time.monotonic(), time.process_time()
    loss = train(model, stream, steps)
    training: dict[str, Any] = {
        "seed": seed,
        "threads": threads,
        "steps": steps,
        "tokens": steps * TOKENS_PER_STEP,
        "corpus_tokens": len(stream),
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": round(time.process_time() - cpu_began),
        "train_perplexity": round(math.exp(loss), 3),
    }
    save(output / "checkpoint", model, tokenizer)
    training |= report_on(output / "checkpoint", corpus)
    (output / "training.json").write_text(json.dumps(training, indent=2) + "\n", encoding="utf-8")
    for name, chosen in corpus.texts().items():
        (output / f"{name}.txt").write_text(END.join(chosen.values()), encoding="utf-8", newline="")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE, help="folder to write into (default: beside this script)")
    parser.add_argument("--steps", type=int, default=1000, help=f"of {TOKENS_PER_STEP} tokens each (default: 1000)")
    parser.add_argument("--threads", type=int, default=2, help="part of the result: sums change with it (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    run(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
