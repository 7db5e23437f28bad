"""Train a draft model: a student with a few layers of an exported model learns to predict its tokens.

    python recipes/distill.py EXPORT STUDENT --layers 4 --text FILE
    llmc build STUDENT --int8 -o DRAFT
    llmc run BUNDLE --draft DRAFT -p "Once upon a time"

EXPORT, the teacher, continues prompts of FILE, and the student minimizes KL(teacher || student) over the teacher's most
probable tokens: https://arxiv.org/abs/1503.02531, for drafts https://arxiv.org/abs/2310.08461. STUDENT is a checkpoint
of the teacher's family; only its layers and last norm are trained. The same seed gives the same bytes on one machine.

Needs the extras `cpu` and `export`, and safetensors. Memory: 4 bytes per weight of the teacher, 20 per trained weight,
and three times the logits of two texts.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.swa_utils import AveragedModel

from llmc.bundle import CONFIG_FILE, ExportManifest, read_export
from llmc.errors import CheckpointError, LlmcError, UsageError
from llmc.export.decoder import Decoder
from llmc.export.families import read_config
from llmc.export.keys import Keys, require_object
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.sources.parameters import list_offset_norms
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.calibrate.text import read_samples
from llmc.origin import copy_tokenizer
from llmc.publish import staging_folder
from llmc.runtime.host.machine import usable_threads

PROMPT, LENGTH = 64, 192  # tokens of a prompt, and of a whole text
CHUNK, GROWTH = 8, 32  # prompt tokens per call, and positions by which the teacher's caches grow
TOP = 32  # most probable tokens that are kept, and that the teacher samples from
ROWS, STEPS = 64, 40  # texts per round, at temperatures from 0 to 1, and steps per round
BATCH, AT_ONCE = 8, 2  # texts per step, and per call: logits of a large vocabulary take the most memory
RATE, BETAS, WARM_UP = 2e-3, (0.9, 0.99), 30  # Adam's, and the steps of warm-up
AVERAGED = 8  # the result averages about this fraction of the steps, the last ones
LEAST = 1e-6  # lower bound of a probability before its logarithm

DTYPES = {"float32": torch.float32, "float16": torch.float16}  # types that weights keep; others become bfloat16

Texts = tuple[Tensor, ...]  # see :func:`write_texts`


def cut(folder: Path, export: ExportManifest, count: int) -> tuple[Decoder, Decoder, dict[str, Any]]:
    """The teacher; a student that starts with ``count`` of its layers, evenly spread from the first to the last; and
    the student's config.json. Weights are float32.

    Raises:
        UsageError: the teacher does not have more layers.
        CheckpointError: these layers do not form a checkpoint of the same family.
    """
    total, source, values = export.geometry.layers, StreamedDecoder(folder), require_object(folder, CONFIG_FILE)
    if not 1 <= count < total:
        raise UsageError("layers", f"is {count}, expected 1 ... {total - 1}, fewer than {folder} has")
    layers = [round(index * (total - 1) / max(count - 1, 1)) for index in range(count)]
    config = replace(source.config, layers=tuple(source.config.layers[index] for index in layers))
    values = {key: value for key, value in values.items() if key not in ("quantization_config", "compression_config")}
    lists = {
        key: value
        for key, value in values.items()
        if isinstance(value, list) and len(value) == total and key[-3:] != "_id"
    }
    values |= {name: [value[index] for index in layers] for name, value in lists.items()} | {"num_hidden_layers": count}
    special = export.geometry.encoder or config.diffusion or config.first_shared or config.per_layer
    special = special or config.transposed or "text_config" in values
    dense = all(layer.attention and not layer.recurrent and not layer.experts for layer in config.layers)
    if special or not dense or read_config(Keys(values, CONFIG_FILE)) != config:
        raise CheckpointError(
            f"{folder}: layers {', '.join(map(str, layers))} do not form a {config.model_type} checkpoint; distill "
            "from a dense model that generates text and whose layers are alike"
        )
    teacher, student = Decoder(source.config), Decoder(config)
    weights = {name: source.rows(name).view(weight.shape) for name, weight in teacher.named_parameters()}
    teacher.load_state_dict(weights, assign=True)
    for index, origin in enumerate(layers):
        copied = teacher.model.layers[origin].state_dict().items()
        weights |= {f"model.layers.{index}.{name}": value.clone() for name, value in copied}
    weights |= {f"model.norm.{name}": value.clone() for name, value in teacher.model.norm.state_dict().items()}
    student.load_state_dict({name: weights[name] for name, _ in student.named_parameters()}, assign=True)
    return teacher, student.requires_grad_(False), values


def feed(model: Decoder, ids: Tensor, start: int, caches: list[Any]) -> Any:
    """Tokens (B, S) at positions from ``start`` -> logits (B, S, V), caches, and the decoder's further outputs."""
    indices = torch.arange(ids.shape[1]).expand(len(ids), -1)
    return model(ids, torch.full((len(ids),), start), indices, caches)


@torch.inference_mode()
def write_texts(
    teacher: Decoder, prompts: Tensor, heat: NDArray[np.float64], stops: Tensor, noise: np.random.Generator
) -> Texts:
    """Continue prompts (R, P) at temperatures (R). Returns ids (R, L) including prompts; and for each token except the
    last: the most probable next tokens (R, L - 1, T), their log-probabilities, and a mask (R, L - 1), False after a
        stop."""
    ids, caches, kept, fed = prompts, teacher.empty_caches(len(prompts), 0), list[tuple[Tensor, Tensor]](), 0
    while fed < LENGTH - 1:
        new = ids[:, fed : fed + CHUNK]
        if fed % GROWTH == 0:
            caches = [tuple(pad(each, (0, 0, 0, GROWTH)) for each in layer) for layer in caches]
        logits, caches, *_ = feed(teacher, new, fed, caches)
        values, tokens = logits.topk(TOP)
        logs = values - logits.logsumexp(-1, keepdim=True)
        kept.append((tokens.int(), logs.half()))
        fed += new.shape[1]
        if fed == ids.shape[1]:
            gumbel = noise.gumbel(size=logs[:, -1].shape)  # the largest sum is a sample
            drawn = torch.from_numpy((logs[:, -1].numpy() + heat[:, None] * gumbel).argmax(-1))
            ids = torch.cat((ids, tokens[:, -1].gather(1, drawn[:, None])), 1)
    tokens, logs = (torch.cat(parts, 1) for parts in zip(*kept, strict=True))
    ended = torch.isin(ids[:, PROMPT:-1], stops).cumsum(1) > 0
    return ids, tokens, logs, ~pad(ended, (PROMPT, 0))


def divergence(logits: Tensor, tokens: Tensor, logs: Tensor, counted: Tensor) -> Tensor:
    """Sum of KL(teacher || student) in nats over the counted positions (B, S), from the student's logits (B, S, V) and
    the teacher's log-probabilities ``logs`` of ``tokens`` (B, S, T); all other tokens count as one."""
    student = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
    rest, student_rest = ((1 - each.exp().sum(-1)).clamp_min(LEAST) for each in (logs, student))
    kept = (logs.exp() * (logs - student)).sum(-1)
    return ((kept + rest * (rest.log() - student_rest.log())) * counted).sum()


def predict(student: Decoder, ids: Tensor) -> Tensor:
    """Texts (B, L) -> the student's logits (B, L - 1, V) after each token except the last."""
    bfloat16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits: Tensor = feed(student, ids[:, :-1], 0, student.empty_caches(len(ids), LENGTH - 1))[0]
    return logits.float()


@torch.inference_mode()
def agreement(student: Decoder, texts: Texts) -> float:
    """Fraction of greedy tokens, after the prompts, that are also the student's most probable ones."""
    right = 0
    for ids, counted in zip(texts[0].split(AT_ONCE), texts[3].split(AT_ONCE), strict=True):
        right += int(((predict(student, ids).argmax(-1) == ids[:, 1:]) & counted)[:, PROMPT - 1 :].sum())
    return right / max(int(texts[3][:, PROMPT - 1 :].sum()), 1)


def train(teacher: Decoder, student: Decoder, prompts: NDArray[np.int64], stops: Tensor, steps: int, seed: int) -> None:
    """Train the student's layers and last norm on the teacher's continuations of prompts (N, P)."""
    trained, texts = nn.ModuleList((student.model.layers, student.model.norm)).requires_grad_(True), Texts()
    optimizer = torch.optim.Adam(trained.parameters(), RATE, betas=BETAS)
    average = AveragedModel(
        trained, avg_fn=lambda mean, new, count: mean.lerp(new, 1 - (1 - 1 / (int(count) + 1)) ** AVERAGED)
    )
    order = generator(seed, 0, "order").permutation(len(prompts))
    for step in range(steps):
        if step % STEPS == 0:
            number = step // STEPS
            chosen = torch.from_numpy(prompts[order[np.arange(number * ROWS, (number + 1) * ROWS) % len(order)]])
            noise = generator(seed, 0, f"texts-{number:05d}")
            new = write_texts(teacher, chosen, np.linspace(0, 1, ROWS), stops, noise)
            texts = tuple(map(torch.cat, zip(texts, new, strict=True))) if texts else new
        rows = generator(seed, step, "step").integers(len(texts[0]), size=BATCH)
        lost, batch = 0.0, [each[rows] for each in texts]
        for ids, tokens, logs, counted in zip(*(each.split(AT_ONCE) for each in batch), strict=True):
            loss = divergence(predict(student, ids), tokens.long(), logs.float(), counted) / batch[3].sum()
            loss.backward()
            lost += loss.item()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(trained)
        if step % 10 == 9:
            print(f"step {step + 1} of {steps}: divergence {lost:.2f} nats", flush=True)
    trained.load_state_dict(average.module.state_dict())


def generator(seed: int, number: int, use: str) -> np.random.Generator:
    return np.random.default_rng([seed, number, *use.encode()])


def write_checkpoint(folder: Path, student: Decoder, values: dict[str, Any], teacher: Path, dtype: torch.dtype) -> None:
    """Write the student with the teacher's tokenizer, and check that llmc reads it (else CheckpointError)."""
    copy_tokenizer(teacher, folder)
    weights = {name: value.detach() for name, value in student.named_parameters()}
    weights |= {name: weights[name] - 1 for name in list_offset_norms(student.config)}
    stored = {name: value.to(dtype).contiguous() for name, value in weights.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2), encoding="utf-8")
    read_checkpoint(folder)


def distill(
    source: Path, output: Path, *, layers: int, text: Path, steps: int = 200, seed: int = 0
) -> tuple[float, float]:
    """Write the checkpoint of a trained student of ``layers`` layers; return its agreement before and after.

    The agreement is measured on the last tenth of the text's prompts, which training skips: the fraction of the
    teacher's greedy tokens that are also the student's most probable ones, that is, the acceptance of a first draft.
    """
    export = read_export(source)
    torch.set_num_threads(usable_threads())
    vocabulary = export.geometry.vocab_size
    ids = read_samples(text, source, samples=1 << 30, length=PROMPT, vocab_size=vocabulary, remedy="").ids
    prompts, left_out = np.split(ids, [-max(1, len(ids) // 10)])
    teacher, student, values = cut(source, export, layers)
    stops, dtype = torch.tensor(export.generation.eos_token_ids), DTYPES.get(export.source.dtype, torch.bfloat16)
    with staging_folder(output) as folder:
        write_checkpoint(folder, student, values, source, dtype)  # fails now if llmc cannot read the student
        greedy = torch.from_numpy(left_out[:ROWS])
        judged = write_texts(teacher, greedy, np.zeros(len(greedy)), stops, generator(seed, 0, "judged"))
        before = agreement(student, judged)
        train(teacher, student, prompts, stops, steps, seed)
        write_checkpoint(folder, student, values, source, dtype)
    return before, agreement(student, judged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("student", type=Path, help="new folder")
    parser.add_argument("--layers", type=int, required=True, help="of the student")
    parser.add_argument("--text", type=Path, required=True, help="text, or chats as JSONL, to take prompts from")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        before, after = distill(
            args.export, args.student, layers=args.layers, text=args.text, steps=args.steps, seed=args.seed
        )
    except LlmcError as error:
        sys.exit(f"error: {error}")
    print(f"{before:.1%} of the model's greedy tokens before, {after:.1%} after; wrote {args.student}")


if __name__ == "__main__":
    main()
