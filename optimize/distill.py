"""Distillation: a student of a few layers learns to guess what its teacher says, so as to draft for it.

The teacher goes on with prompts out of the user's text, and at each token the probabilities of those that it finds most
probable are kept; the student learns these (https://arxiv.org/abs/1503.02531, of drafts https://arxiv.org/abs/2310.08461).
A step follows from the seed and its number alone, so an interrupted run goes on as if it had not been.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.swa_utils import AveragedModel

from llmc.bundle import CONFIG_FILE, ExportManifest, read_export
from llmc.errors import BuildError, UsageError, format_value
from llmc.optimize.calibrate.text import Ids, read_samples
from llmc.optimize.progress import Progress, silent
from llmc.publish import refuse_bytes, replace_file
from llmc.runtime.host.machine import usable_threads

RUN, STATE, CHECKPOINT = "distill", "state.pt", "checkpoint"  # in the output's folder that of a run, and what is in it
PROMPT, LENGTH = 64, 192  # tokens of a prompt, and with what the teacher says after it
PIECE, GROWTH = 8, 32  # tokens of a prompt that are fed at a time, and positions by which the teacher's caches grow
TOP = 32  # most probable tokens that are kept, and out of which the teacher draws
ROWS, STEPS = 64, 40  # texts of a round, each at another temperature from 0 to 1, and steps before the next round
BATCH, AT_ONCE = 8, 2  # texts of a step, and of a call: logits of a large vocabulary take the most memory
RATE, BETAS, WARM_UP = 1e-3, (0.9, 0.99), 50  # Adam's, and the steps until the rate is reached
AVERAGED = 8  # the result is an average over about that part of the steps, the last ones
LONGEST_GRADIENT = 1.0
LEAST = 1e-6  # of a probability whose logarithm is taken

Texts = dict[str, Tensor]


@dataclass(frozen=True)
class DistillReport:
    """The student's checkpoint ``output``, and the teacher's ``layers`` that it began with; ``steps`` of the training in
    all runs, and ``tokens`` that the teacher wrote for it; ``seconds`` of this run. ``before`` and ``after``: how often
    the student's most probable token is the teacher's, after prompts that were left out of the training."""

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
    open_pair: Callable[[Path, int, str], Any],
    minutes: float = 30.0,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> DistillReport:
    """Train a student of ``student`` layers on what the exported decoder ``source`` says, and write its checkpoint.

    Where ``output`` holds an earlier run of the same arguments it goes on, until ``steps`` in all if these are given,
    else for ``minutes``; a step that was begun is finished, and the texts that the teacher writes before it.

    Args:
        text: plain text, or chats as JSONL; its last tenth is left out of the training.
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
    refuse_bytes(output)
    pair, folder = open_pair(source, student, "cuda" if torch.cuda.is_available() else "cpu"), output / RUN
    identity = {"teacher": export.source.fingerprint, "student": student, "text": prompts.sha256, "seed": seed}
    if not (folder / STATE).exists():
        if output.exists() and not (output.is_dir() and set(os.listdir(output)) <= {RUN}):
            raise UsageError(f"{output} exists, and no distillation made it; choose another output folder")
        _write_checkpoint(pair, folder)  # what cannot be written is refused now
    state = _keep(folder / STATE, lambda: {"identity": identity, "steps": 0})
    for name, value in identity.items():
        if value != (earlier := state["identity"][name]):
            raise UsageError(
                f"{output} was begun with another {name}, {format_value(earlier)}, now it is {format_value(value)}; go "
                "on with the former, or choose another output folder"
            )
    run = _Run(pair, folder, state, prompts.ids, export, progress)
    before = run.judge()
    run.restore()
    while run.steps < steps if steps is not None else time.monotonic() < began + 60 * minutes:
        run.train(run.steps / steps if steps else (time.monotonic() - began) / (60 * minutes))
    run.save()
    after = run.finish()
    _write_checkpoint(pair, folder)
    for path in sorted((folder / CHECKPOINT).iterdir(), key=lambda path: path.name == CONFIG_FILE):
        os.replace(path, output / path.name)  # the config, without which there is no checkpoint, is the last
    tokens = len(run.texts) * ROWS * (LENGTH - PROMPT)
    return DistillReport(output, pair.layers, run.steps, tokens, before, after, time.monotonic() - began)


def _write_checkpoint(pair: Any, folder: Path) -> None:
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    (folder / CHECKPOINT).mkdir(parents=True)
    pair.write(folder / CHECKPOINT)


class _Run:
    """The training: ``steps`` of it are done, on ``texts`` of some rounds."""

    def __init__(
        self, pair: Any, folder: Path, state: dict[str, Any], prompts: Ids, export: ExportManifest, progress: Progress
    ) -> None:
        self._teacher, self._student, self._folder, self._state = pair.teacher, pair.model, folder, state
        self._stops, self._progress = torch.tensor(export.generation.eos_token_ids), progress
        self._trained = nn.ModuleList((pair.model.model.layers, pair.model.model.norm))
        self._average = AveragedModel(self._trained, avg_fn=_average)
        self._optimizer = torch.optim.Adam(self._trained.parameters(), RATE, betas=BETAS)
        self._parts = {"trained": self._trained, "average": self._average, "optimizer": self._optimizer}
        self._device = next(self._trained.parameters()).device
        self._bfloat16 = self._device.type == "cuda" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))
        left_out = max(1, len(prompts) // 10)
        self._prompts, greedy = prompts[:-left_out], prompts[-left_out:][:ROWS]
        self._judged = self._write_texts("judged", greedy, np.zeros(len(greedy)))
        self.steps, self.texts = 0, list[Texts]()

    def restore(self) -> None:
        """Go to where an earlier run was saved."""
        self.steps = self._state["steps"]
        for name, part in self._parts.items() if self.steps else ():
            part.load_state_dict(self._state[name])
        self.texts = [self._write_round(number) for number in range(-(-self.steps // STEPS))]

    def save(self) -> None:
        states = {name: part.state_dict() for name, part in self._parts.items()}
        _save(self._folder / STATE, {"identity": self._state["identity"], "steps": self.steps, **states})

    def train(self, done: float) -> None:
        """Make the next step; ``done`` is the share of all that is."""
        if len(self.texts) * STEPS == self.steps:
            self.save()
            self._progress("the teacher writes", done)
            self.texts.append(self._write_round(len(self.texts)))
        self._optimizer.param_groups[0]["lr"] = RATE * min(1.0, (self.steps + 1) / WARM_UP)
        chosen = self._rng("step", self.steps).integers(len(self.texts) * ROWS, size=BATCH).tolist()
        rows = [{kind: it[row % ROWS] for kind, it in self.texts[row // ROWS].items()} for row in chosen]
        batch = {kind: torch.stack([row[kind] for row in rows]) for kind in rows[0]}
        lost, count = 0.0, batch["counted"].sum()
        for ids, tokens, logs, counted in self._parts_of(batch):
            loss = divergence(self._logits(ids), tokens.long(), logs.float(), counted) / count
            loss.backward()  # type: ignore[no-untyped-call]
            lost += loss.item()
        nn.utils.clip_grad_norm_(self._trained.parameters(), LONGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._average.update_parameters(self._trained)
        self.steps += 1
        self._progress(f"training, step {self.steps}, divergence {lost:.2f}", done)

    def finish(self) -> float:
        """Give the student its average weights, and :meth:`judge` it."""
        if self.steps:
            self._trained.load_state_dict(self._average.module.state_dict())
        return self.judge()

    @torch.inference_mode()
    def judge(self) -> float:
        """The share of tokens of greedy texts that the student finds most probable, too."""
        right, count = 0, 0
        for ids, _, _, counted in self._parts_of(self._judged):
            said = counted[:, PROMPT - 1 :]
            right += int(((self._logits(ids).argmax(-1) == ids[:, 1:])[:, PROMPT - 1 :] & said).sum())
            count += int(said.sum())
        return right / max(count, 1)

    def _parts_of(self, texts: Texts) -> Iterator[list[Tensor]]:
        """The kinds of texts that are computed at a time."""
        for start in range(0, len(texts["ids"]), AT_ONCE):
            yield [each[start : start + AT_ONCE].to(self._device) for each in texts.values()]

    def _logits(self, ids: Tensor) -> Tensor:
        """Texts (B, L) -> the student's logits (B, L - 1, V) after each token but the last."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            return feed(self._student, ids[:, :-1], 0, empty_caches(self._student, len(ids), LENGTH - 1))[0].float()

    def _write_round(self, number: int) -> Texts:
        """Texts after the next prompts, in an order of chance that begins anew after the last one."""
        order = self._rng("order", 0).permutation(len(self._prompts))
        chosen = order[np.arange(number * ROWS, (number + 1) * ROWS) % len(order)]
        return self._write_texts(f"texts-{number:05d}", self._prompts[chosen], np.linspace(0, 1, ROWS))

    def _write_texts(self, name: str, prompts: Ids, temperatures: NDArray[np.float64]) -> Texts:
        given = torch.from_numpy(prompts).to(self._device)
        return _keep(
            self._folder / f"{name}.pt",
            lambda: write_texts(self._teacher, given, temperatures, self._stops, self._rng(name, 0)),
        )

    def _rng(self, use: str, number: int) -> np.random.Generator:
        return np.random.default_rng([self._state["identity"]["seed"], number, *use.encode()])


@torch.inference_mode()
def write_texts(
    teacher: nn.Module, prompts: Tensor, heat: NDArray[np.float64], stops: Tensor, noise: np.random.Generator
) -> Texts:
    """What a decoder says after prompts (R, P) at temperatures (R): ``ids`` (R, L), prompts and all; after each but the
    last the most probable ``tokens`` (R, L - 1, T), ``logs`` of their probabilities, and whether it is ``counted``, for
    none after the first of ``stops`` is."""
    ids, caches, found, fed = prompts, empty_caches(teacher, len(prompts), 0), list[tuple[Tensor, Tensor]](), 0
    while fed < LENGTH - 1:
        new = ids[:, fed : fed + PIECE]
        if fed % GROWTH == 0:
            caches = [tuple(pad(each, (0, 0, 0, GROWTH)) for each in layer) for layer in caches]
        logits, caches, *_ = feed(teacher, new, fed, caches)
        values, tokens = logits.topk(min(TOP, logits.shape[-1]))
        logs = values - logits.logsumexp(-1, keepdim=True)
        found.append((tokens.int().cpu(), logs.half().cpu()))
        fed += new.shape[1]
        if fed == ids.shape[1]:
            gumbel = noise.gumbel(size=logs[:, -1].shape)  # with it the largest is a sample
            drawn = torch.from_numpy((logs[:, -1].cpu().numpy() + heat[:, None] * gumbel).argmax(-1)).to(ids.device)
            ids = torch.cat((ids, tokens[:, -1].gather(1, drawn[:, None])), 1)
    tops, ids = [torch.cat(parts, 1) for parts in zip(*found, strict=True)], ids.cpu()
    ended = torch.isin(ids[:, PROMPT:-1], stops).cumsum(1) > 0
    return {"ids": ids, "tokens": tops[0], "logs": tops[1], "counted": ~pad(ended, (PROMPT, 0))}


def divergence(logits: Tensor, tokens: Tensor, logs: Tensor, counted: Tensor) -> Tensor:
    """KL(teacher || student) in nats, summed over the positions that are counted (B, S): of logits (B, S, V), where of
    the teacher the log-probabilities ``logs`` of ``tokens`` (B, S, T) are known, and all others are taken as one."""
    student = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
    rest, own_rest = ((1 - each.exp().sum(-1)).clamp_min(LEAST) for each in (logs, student))
    kept = (logs.exp() * (logs - student)).sum(-1)
    return ((kept + rest * (rest.log() - own_rest.log())) * counted).sum()


def feed(model: nn.Module, ids: Tensor, start: int, caches: list[tuple[Tensor, ...]]) -> Any:
    """Tokens (B, S) at positions from ``start`` -> logits (B, S, V), caches and what else a decoder gives."""
    indices = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    return model(ids, torch.full((len(ids),), start, device=ids.device), indices, caches)


def empty_caches(model: Any, rows: int, capacity: int) -> list[tuple[Tensor, ...]]:
    """Caches of all layers of a decoder."""
    geometry, device = model.config.geometry, model.model.norm.weight.device
    held = [geometry.caches_of(index) for index in range(geometry.layers)]
    shapes = [[cache.shape_of(rows, capacity) for cache in caches for _ in cache.inputs] for caches in held]
    return [tuple(torch.zeros(shape, device=device) for shape in layer) for layer in shapes]


def _average(average: Tensor, weight: Tensor, steps: Tensor | int) -> Tensor:
    return average.lerp(weight, 1 - (1 - 1 / (int(steps) + 1)) ** AVERAGED)


def _save(path: Path, values: dict[str, Any]) -> None:
    with replace_file(path, f".{path.name}-") as file:
        torch.save(values, file)


def _keep(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file keeps, which is made if it is not there."""
    if not path.exists():
        _save(path, make())
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found
    except (EOFError, RuntimeError, UnpicklingError) as error:
        raise BuildError(f"{path} is broken; remove {path.parent.parent} and distill again") from error
