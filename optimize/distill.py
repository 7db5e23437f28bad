"""Distillation: a student of a few layers learns to guess what its teacher says, so as to draft for it.

The teacher goes on with prompts out of the user's text, and at each token the probabilities of those that it finds most
probable are kept; the student learns these (Hinton et al., https://arxiv.org/abs/1503.02531; of drafts DistillSpec,
https://arxiv.org/abs/2310.08461). What a step does follows from the seed and the step's number alone, so an interrupted
run goes on as if it had not been.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from llmc.bundle import CONFIG_FILE, read_export
from llmc.errors import UsageError, format_value
from llmc.optimize.calibrate.text import Ids, read_samples
from llmc.optimize.progress import Progress, silent
from llmc.optimize.weights.store import Arrays, Store
from llmc.publish import refuse_bytes, replace_file
from llmc.runtime.host.machine import usable_threads
from llmc.strict import read_json

RUN, CHECKPOINT = "distill", "checkpoint"  # in the student's folder what a run goes on from, and in that its files
PROMPT, LENGTH = 64, 192  # tokens of a prompt, and with what the teacher says after it
PIECE = 8  # tokens of a prompt that are fed at a time, for logits of a large vocabulary take the most memory
GROWTH = 32  # positions by which the teacher's caches grow
TOP = 32  # most probable tokens that are kept, and out of which the teacher draws
ROWS = 64  # texts that the teacher writes at a time, each at another temperature from 0 to 1
STEPS = 40  # after which it writes more
BATCH, AT_ONCE = 8, 2  # texts of a step, and those that are in memory at a time
RATE, BETAS, WARM_UP = 1e-3, (0.9, 0.99), 50  # Adam's, and the steps until the rate is reached
AVERAGED = 8  # the result is an average over about that part of the steps, the last ones
LONGEST_GRADIENT = 1.0
LEAST = 1e-6  # of a probability whose logarithm is taken

# The two decoders: :class:`llmc.export.student.Student`, which this room does not import.
Pair = Any


@dataclass(frozen=True)
class DistillReport:
    """The result of a distillation.

    Attributes:
        output: the student's checkpoint.
        layers: of the teacher, that it began with.
        steps: in all runs together.
        tokens: that the teacher wrote to learn from.
        before, after: how often the student's most probable token is the teacher's, where the teacher goes on greedily
            with prompts that were left out of the training; the share of first drafts that are accepted.
        seconds: of this run.
    """

    output: Path
    layers: tuple[int, ...]
    steps: int
    tokens: int
    before: float
    after: float
    seconds: float


def distill(
    source: Path,
    output: Path,
    *,
    student: int,
    text: Path,
    open_pair: Callable[[Path, int, str], Pair],
    minutes: float = 30.0,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> DistillReport:
    """Train a student of ``student`` layers on what the exported decoder ``source`` says, and write its checkpoint.

    Where ``output`` holds an earlier run of the same arguments it goes on. It ends after ``steps`` in all if they are
    given, else after ``minutes``; the step that was begun is finished, and the texts that the teacher writes before it.

    Args:
        text: plain text, or chats as JSONL; a tenth of it, the end, is left out of the training.
        open_pair: opens the two decoders; the command line passes :class:`llmc.export.student.Student`.

    Raises:
        UsageError: ``output`` is something else, or the text is too short.
        CheckpointError: the export is broken, or its layers make no student.
        BuildError: what an earlier run left is broken.
    """
    began, export = time.monotonic(), read_export(source)
    torch.set_num_threads(usable_threads())
    prompts = read_samples(text, source, samples=1 << 30, length=PROMPT, vocab_size=export.geometry.vocab_size)
    if len(prompts.ids) < 2:
        raise UsageError(f"{text} is too short: {prompts.tokens} tokens, expected {2 * PROMPT}; give a longer text")
    pair = open_pair(source, student, "cuda" if torch.cuda.is_available() else "cpu")
    identity = {"teacher": export.source.fingerprint, "student": student, "text": prompts.sha256, "seed": seed}
    folder = _open_folder(output, identity)
    if not (folder / CHECKPOINT).exists():
        _write_checkpoint(pair, folder)  # what cannot be written is refused now
    run = _Run(pair, Store(folder), prompts.ids, seed, export.generation.eos_token_ids, progress)
    while run.steps < steps if steps is not None else time.monotonic() < began + 60 * minutes:
        run.train(run.steps / steps if steps else (time.monotonic() - began) / (60 * minutes))
    run.save()
    after = run.finish()
    for path in _write_checkpoint(pair, folder):
        os.replace(path, output / path.name)
    seconds = time.monotonic() - began
    return DistillReport(output, pair.layers, run.steps, run.tokens, run.before, after, seconds)


def _open_folder(output: Path, identity: dict[str, Any]) -> Path:
    """The folder of a new run, or of one to go on with."""
    refuse_bytes(output)
    folder, path = output / RUN, output / RUN / "run.json"
    if not path.exists():
        if output.exists() and not (output.is_dir() and set(os.listdir(output)) <= {RUN}):
            raise UsageError(f"{output} exists, and no distillation made it; choose another output folder")
        folder.mkdir(parents=True, exist_ok=True)
        with replace_file(path, ".run-") as file:
            file.write(json.dumps(identity).encode())
    earlier = read_json(path)
    for name, value in identity.items():
        if earlier.get(name) != value:
            raise UsageError(
                f"{output} was begun with another {name}, {format_value(earlier.get(name))}, now it is "
                f"{format_value(value)}; go on with the former, or choose another output folder"
            )
    return folder


def _write_checkpoint(pair: Pair, folder: Path) -> list[Path]:
    """Write the student's files; the config, without which there is no checkpoint, is the last of them."""
    place = folder / CHECKPOINT
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    pair.write(place)
    return sorted(place.iterdir(), key=lambda path: path.name == CONFIG_FILE)


class _Run:
    """A distillation, as far as an interrupted one left it in the store.

    Attributes:
        steps: done so far.
        before: what :meth:`judge` found of the student as it began.
    """

    def __init__(
        self, pair: Pair, store: Store, prompts: Ids, seed: int, stops: Sequence[int], progress: Progress
    ) -> None:
        self._pair, self._store, self._seed, self._stops, self._progress = pair, store, seed, stops, progress
        self._weights = {name: it for name, it in pair.model.named_parameters() if it.requires_grad}
        self._average = {name: it.detach().clone() for name, it in self._weights.items()}
        self._optimizer = torch.optim.Adam(self._weights.values(), RATE, betas=BETAS)
        self._device = next(iter(self._weights.values())).device
        self._bfloat16 = self._device.type == "cuda" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))
        left_out = max(1, len(prompts) // 10)
        self._prompts, self._texts, self.steps = prompts[:-left_out], list[Arrays](), 0
        greedy = prompts[-left_out:][:ROWS]
        self._judged = self._write_texts("judged", greedy, np.zeros(len(greedy)))
        if not store.has("before"):
            store.write("before", {"share": np.array(self.judge())})
        self.before = float(store.read("before")["share"])
        if store.has("state"):
            self._restore(store.read("state"))

    @property
    def tokens(self) -> int:
        return len(self._texts) * ROWS * (LENGTH - PROMPT)

    def train(self, done: float) -> None:
        """Make the next step; ``done`` is the share of all that is."""
        while len(self._texts) * STEPS <= self.steps:
            if self.steps % STEPS == 0:
                self.save()
            self._progress("the teacher writes", done)
            self._texts.append(self._write_round(len(self._texts)))
        self._optimizer.param_groups[0]["lr"] = RATE * min(1.0, (self.steps + 1) / WARM_UP)
        chosen = self._rng("step", self.steps).integers(len(self._texts) * ROWS, size=BATCH)
        parts = [self._gather(chosen[start : start + AT_ONCE]) for start in range(0, BATCH, AT_ONCE)]
        count, total = sum(part[-1].sum() for part in parts), 0.0
        for part in parts:
            loss = self._divergence(*part) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._weights.values(), LONGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        with torch.no_grad():
            for name, weight in self._weights.items():
                self._average[name].lerp_(weight, 1 - (1 - 1 / self.steps) ** AVERAGED)
        self._progress(f"training, step {self.steps}, divergence {total:.2f}", done)

    def save(self) -> None:
        """Write down what the next step needs, beside the texts."""
        arrays = {"steps": np.array(self.steps)}
        for name, weight in self._weights.items():
            state = self._optimizer.state.get(weight, {})
            kept = {"weight": weight.detach(), "average": self._average[name], **state}
            arrays |= {f"{kind}:{name}": value.cpu().numpy() for kind, value in kept.items()}
        self._store.write("state", arrays)

    def finish(self) -> float:
        """Give the student its average weights, and :meth:`judge` it."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._average[name])
        return self.judge()

    @torch.inference_mode()
    def judge(self) -> float:
        """The share of tokens of the greedy texts that the student finds most probable, too."""
        right = count = 0.0
        for start in range(0, len(self._judged["ids"]), AT_ONCE):
            ids, _, _, counted = self._tensors(self._judged, slice(start, start + AT_ONCE))
            same = self._logits(ids).argmax(-1) == ids[:, 1:]
            right += float((same * counted)[:, PROMPT - 1 :].sum())
            count += float(counted[:, PROMPT - 1 :].sum())
        return right / max(count, 1.0)

    # -------------------------------------------------------------------------------------------------- the teacher

    def _write_round(self, number: int) -> Arrays:
        """Texts of the next prompts, in an order of chance that begins anew after the last one."""
        order = self._rng("order", 0).permutation(len(self._prompts))
        chosen = order[np.arange(number * ROWS, (number + 1) * ROWS) % len(order)]
        return self._write_texts(f"texts-{number:05d}", self._prompts[chosen], np.linspace(0, 1, ROWS))

    @torch.inference_mode()
    def _write_texts(self, name: str, prompts: Ids, temperatures: NDArray[np.float64]) -> Arrays:
        """What the teacher says after prompts [R, P]: ids [R, L], and at all but the last its most probable tokens
        [R, L - 1, T], these logarithms of their probabilities, and whether they count: none after its end does."""
        if self._store.has(name):
            return self._store.read(name)
        teacher, noise, rows = self._pair.teacher, self._rng(name, 0), len(prompts)
        ids, heat = torch.from_numpy(prompts).to(self._device), torch.from_numpy(temperatures[:, None])
        caches, found, fed = self._pair.caches(teacher, rows, 0), list[tuple[Tensor, Tensor]](), 0
        while fed < LENGTH - 1:
            new = ids[:, fed : fed + PIECE]
            if fed % GROWTH == 0:
                caches = [tuple(pad(each, (0, 0, 0, GROWTH)) for each in layer) for layer in caches]
            logits, caches, *_ = teacher(new, *self._places(new, fed), caches)
            values, tokens = logits.topk(min(TOP, logits.shape[-1]))
            logarithms = values - logits.logsumexp(-1, keepdim=True)
            found.append((tokens.int().cpu(), logarithms.half().cpu()))
            fed += new.shape[1]
            if fed == ids.shape[1]:
                gumbel = torch.from_numpy(noise.gumbel(size=logarithms[:, -1].shape))  # its highest is a sample
                drawn = (logarithms[:, -1].cpu() + heat * gumbel).argmax(-1, keepdim=True)
                ids = torch.cat((ids, tokens[:, -1].gather(1, drawn.to(self._device))), 1)
        said = ids.cpu().numpy()
        counted = np.ones((rows, LENGTH - 1), bool)
        counted[:, PROMPT:] = np.isin(said[:, PROMPT:-1], self._stops).cumsum(1) == 0
        tops = {kind: torch.cat(parts, 1).numpy() for kind, parts in zip(("tokens", "logarithms"), zip(*found, strict=True), strict=True)}
        self._store.write(name, {"ids": said, **tops, "counted": counted})
        return self._store.read(name)

    # -------------------------------------------------------------------------------------------------- the student

    def _gather(self, chosen: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Texts of several rounds as :meth:`_tensors`."""
        parts = [self._tensors(self._texts[each // ROWS], slice(each % ROWS, each % ROWS + 1)) for each in chosen]
        return tuple(torch.cat(of_kind) for of_kind in zip(*parts, strict=True))

    def _tensors(self, texts: Arrays, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids, tokens, logarithms, counted = (
            torch.from_numpy(texts[kind][rows]).to(self._device) for kind in ("ids", "tokens", "logarithms", "counted")
        )
        return ids, tokens.long(), logarithms.float(), counted.float()

    def _logits(self, ids: Tensor) -> Tensor:
        """Texts (B, L) -> the student's logits (B, L - 1, V) after each token but the last."""
        given = ids[:, :-1]
        caches = self._pair.caches(self._pair.model, *given.shape)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            logits: Tensor = self._pair.model(given, *self._places(given, 0), caches)[0]
        return logits.float()

    def _divergence(self, ids: Tensor, tokens: Tensor, teacher: Tensor, counted: Tensor) -> Tensor:
        """KL(teacher || student) in nats over the kept tokens and all others as one, summed over what counts."""
        logits = self._logits(ids)
        student = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
        others = [(1 - each.exp().sum(-1)).clamp_min(LEAST) for each in (teacher, student)]
        kept = (teacher.exp() * (teacher - student)).sum(-1)
        return ((kept + others[0] * (others[0].log() - others[1].log())) * counted).sum()

    # ---------------------------------------------------------------------------------------------------------- both

    def _places(self, ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """The lengths before new tokens (B, S), and the indices of all of them."""
        lengths = torch.full((len(ids),), start, device=self._device)
        return lengths, torch.arange(ids.shape[1], device=self._device).expand(len(ids), -1)

    def _restore(self, state: Arrays) -> None:
        self.steps = int(state["steps"])
        while len(self._texts) * STEPS < self.steps:
            self._texts.append(self._write_round(len(self._texts)))
        with torch.no_grad():
            for name, weight in self._weights.items():
                kept = {key.removesuffix(f":{name}"): it for key, it in state.items() if key.endswith(f":{name}")}
                kept = {kind: torch.from_numpy(it) for kind, it in kept.items()}
                weight.copy_(kept.pop("weight"))
                self._average[name].copy_(kept.pop("average"))
                self._optimizer.state[weight] = {kind: it.to(self._device) for kind, it in kept.items()}

    def _rng(self, use: str, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, number, *use.encode()])
