"""Train a small diffusion language model on generated records, and measure what thresholds give it.

A prompt names a person and a city; the answer says them and the country, and a day, a way and a thing that are free,
once in JSON and most of it once more. So a trained model is sure of most tokens and cannot be of some, and whether an
answer is right can be computed. Text that people write is far less regular.

The model has Dream's layout. It learns by the rule of LLaDA (https://arxiv.org/abs/2502.09992, equation 5): a share t
of the answer's tokens, uniform from 0 to 1, is masked, and the cross-entropy of these counts 1/t times.
"""

import argparse
import json
import math
import operator
import random
import re
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from llmc.export import export
from llmc.optimize.build import build
from llmc.runtime import Model, load

END, MASK = 0, 3
PROMPT, ANSWER = 5, 64  # tokens, the most of them
FIRST = ("Ada", "Ben", "Carla", "Emil", "Fritz", "Greta", "Hugo", "Ida", "Karl", "Lena", "Max", "Nora", "Otto", "Rosa")
LAST = ("", " Adler", " Berg", " Falk", " Hahn", " Iversen", " Koch", " Lind", " Moss", " Stein")
LANDS = {"Athens": "Greece", "Basel": "Switzerland", "Cork": "Ireland", "Delft": "Holland", "Essen": "Germany"}
LANDS |= {"Faro": "Portugal", "Ghent": "Belgium", "Izmir": "Turkey", "Lyon": "France", "Malmo": "Sweden"}
LANDS |= {"Oslo": "Norway", "Prague": "Czechia", "Riga": "Latvia", "Turin": "Italy", "York": "England"}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
WAYS = ("air", "car", "rail", "road", "sea", "ship")
THINGS = ("lamp", "chair", "clock", "plate", "mirror", "carpet")
KINDS = ("", " box", " kit", " pair", " set")
TOKENS = ("<end>", "\n", "?", "<mask>", *'{}":,', "name", "land", "day", "by", "for", *FIRST, *LAST[1:], *LANDS)
TOKENS += (*LANDS.values(), *DAYS, *WAYS, *THINGS, *KINDS[1:])
FREE = re.compile(r'.*"day":"(\w+)","by":"(\w+)","for":"([a-z ]+)"}\n.*:([a-z ]+),(\w+),(\w+)')
BATCH, LEARNING_RATE, WARMUP = 32, 4e-3, 0.04
SIZES = {"vocab_size": len(TOKENS), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Record:
    """A thing that someone in a city gets on a day."""

    name: str
    city: str
    day: str
    way: str
    thing: str

    @classmethod
    def draw(cls, chance: random.Random, held_out: bool = False) -> "Record":
        """One of a prompt for training, or of the eighth of the prompts that are held out."""
        while True:
            name, thing = (chance.choice(one) + chance.choice(two) for one, two in ((FIRST, LAST), (THINGS, KINDS)))
            found = cls(name, chance.choice(list(LANDS)), chance.choice(DAYS), chance.choice(WAYS), thing)
            if (zlib.crc32(found.prompt.encode()) % 8 == 0) is held_out:
                return found

    @property
    def prompt(self) -> str:
        return f"{self.name},{self.city}\n"

    @property
    def answer(self) -> str:
        facts = {"name": self.name, "land": LANDS[self.city], "day": self.day, "by": self.way, "for": self.thing}
        known = json.dumps(facts, separators=(",", ":"))
        return f"{known}\n{self.name},{self.city},{LANDS[self.city]}:{self.thing},{self.way},{self.day}"

    def judge(self, answer: str) -> tuple[bool, float]:
        """True if it says what is known, in the right form; and the share of what is free that it says twice alike."""
        found = FREE.fullmatch(answer)
        if not found:
            return False, 0.0
        day, way, thing = found.groups()[:3]
        known = replace(self, day=day, way=way, thing=thing).answer.rpartition(":")[0] == answer.rpartition(":")[0]
        return known, sum(map(operator.eq, (thing, way, day), found.groups()[3:])) / 3


def make_tokenizer() -> Tokenizer:
    """Words, and single characters of all else; what is no token is a question mark."""
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(TOKENS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|.|\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([TOKENS[END], TOKENS[MASK]])
    return tokenizer


def draw_batch(chance: random.Random, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Prompts and answers, padded with END: (B, S), and which tokens are of the answers: (B, S)."""
    records = [Record.draw(chance) for _ in range(BATCH)]
    texts = [text.ids for text in tokenizer.encode_batch_fast([it.prompt + it.answer for it in records])]
    starts = torch.tensor([[ids.index(TOKENS.index("\n")) + 1] for ids in texts])
    rows = torch.tensor([(ids + [END] * ANSWER)[: PROMPT + ANSWER] for ids in texts])
    return rows, torch.arange(PROMPT + ANSWER) >= starts


def loss_of(model: nn.Module, rows: Tensor, answers: Tensor) -> Tensor:
    """The cross-entropy in nats of the answers' masked tokens over their share, by token of an answer; for rows (B, S).

    Shares are spread evenly over the batch, which leaves each one's distribution uniform.
    """
    share = ((torch.arange(len(rows)) + torch.rand(1)) / len(rows)).clamp_min(1 / ANSWER)[:, None]
    hidden = (torch.rand(rows.shape) < share) & answers
    every = torch.zeros(1, 1, 1, 1).expand(len(rows), 1, rows.shape[1], rows.shape[1])
    logits = model(input_ids=rows.masked_fill(hidden, MASK), attention_mask=every, use_cache=False).logits
    nats = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none")
    return (nats.view(len(rows), -1) * hidden[:, 1:] / share).sum() / answers.sum()


def train(steps: int, seed: int) -> Qwen2ForCausalLM:
    """A model whose logits for a token are at the position before it, as Dream's are."""
    torch.manual_seed(seed)
    tokenizer, chance = make_tokenizer(), random.Random(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, attn_implementation="eager"))
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or ".layers." not in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    smoothed = math.log(len(TOKENS))
    for step in range(steps):
        part = step / steps
        rate = part / WARMUP if part < WARMUP else 0.5 * (1 + math.cos(math.pi * part))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, *draw_batch(chance, tokenizer))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        smoothed += max(0.02, 1 / (step + 1)) * (loss.item() - smoothed)
        if step % 100 == 99:
            print(f"step {step + 1}/{steps}: {smoothed:.3f} nats, {time.process_time():.0f} s", flush=True)
    return model


def write_checkpoint(model: Qwen2ForCausalLM, folder: Path, family: str) -> None:
    """A new folder with the weights in float16; as ``qwen2`` they speak nonsense, at the speed of tokens in turn."""
    folder.mkdir(parents=True)
    config = {"model_type": family, **SIZES, "hidden_act": "silu", "eos_token_id": END}
    config |= {"mask_token_id": MASK} if family == "Dream" else {}
    (folder / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
    save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    make_tokenizer().save(str(folder / "tokenizer.json"))


def measure(model: Model, records: list[Record], **asked: Any) -> tuple[float, ...]:
    """Tokens of a call, and of a second of processor time, the share of answers that are right in what is known, and
    of what is free the share that is said twice alike."""
    began = time.process_time()
    found = [model.generate(it.prompt, max_tokens=ANSWER, temperature=0, **asked) for it in records]
    seconds = time.process_time() - began
    tokens = sum(len(it.token_ids) for it in found)
    calls = sum(it.metrics.calls for it in found) or tokens  # autoregressive: one a token
    known, alike = zip(*(record.judge(it.text) for record, it in zip(records, found, strict=True)), strict=True)
    return tokens / calls, tokens / seconds, sum(known) / len(known), sum(alike) / len(alike)


CASES: dict[str, dict[str, Any]] = {"one token a call": {"diffusion_steps": ANSWER}}
CASES |= {f"threshold {value}": {"confidence_threshold": value} for value in (1.0, 0.99, 0.95, 0.9, 0.7, 0.5, 0.3)}
CASES |= {f"0.9, blocks of {length}": {"block_length": length} for length in (8, 16, 64)}
CASES |= {f"0.9, block_cache {kept}": {"block_cache": kept} for kept in ("renewed", "off")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new, or of an earlier run, whose checkpoints are taken")
    for name, default in (("steps", 3000), ("seed", 0), ("records", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="int8")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.folder.exists():
        model = train(args.steps, args.seed)
        for family in ("Dream", "qwen2"):
            write_checkpoint(model, args.folder / family, family)
    chance, loaded = random.Random(args.seed), {}
    records = [Record.draw(chance, held_out=True) for _ in range(args.records)]
    for family in ("Dream", "qwen2"):
        built = args.folder / f"{family}-{args.precision}"
        if not built.exists():
            export(args.folder / family, args.folder / f"{family}-export", force=True)
            build(args.folder / f"{family}-export", built, precision=args.precision)
        loaded[family] = load(built, threads=1, self_test=False, prefix_cache_bytes=0)
    speed = measure(loaded["qwen2"], records, ignore_eos=True)[1]
    print(f"autoregressive, of the same size: 1 token a call, {speed:.0f} a second")
    for name, asked in CASES.items():
        a_call, speed, known, alike = measure(loaded["Dream"], records, **asked)
        print(f"{name}: {a_call:.2f} tokens a call, {speed:.0f} a second, {known:.1%} right, {alike:.1%} alike")


if __name__ == "__main__":
    main()
