"""Distillation: a student of a few layers learns to guess what its teacher says, so as to draft for it.

The teacher goes on with prompts out of the user's text, and at each token the probabilities of those that it finds most
probable are kept; the student learns these (https://arxiv.org/abs/1503.02531, of drafts https://arxiv.org/abs/2310.08461).
A step follows from the seed and its number alone, so an interrupted run goes on as if it had not been.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.swa_utils import AveragedModel

from llmc.bundle import read_export
from llmc.errors import CheckpointError, UsageError
from llmc.optimize.calibrate.text import Ids, read_samples
from llmc.optimize.progress import Progress, silent
from llmc.publish import replace_file
from llmc.runtime.host.machine import usable_threads

RUN, STATE = "distill", "state.pt"  # the folder of a run in that of its output, and what it goes on from
PROMPT, LENGTH = 64, 192  # tokens of a prompt, and with what the teacher says after it
PIECE, GROWTH = 8, 32  # tokens of a prompt that are fed at a time, and positions by which the teacher's caches grow
TOP = 32  # most probable tokens that are kept, and out of which the teacher draws
ROWS, STEPS = 64, 40  # texts of a round, each at another temperature from 0 to 1, and steps before the next round
BATCH, AT_ONCE = 8, 2  # texts of a step, and of a call: logits of a large vocabulary take the most memory
RATE, BETAS, WARM_UP = 2e-3, (0.9, 0.99), 30  # Adam's, and the steps until the rate is reached
AVERAGED = 8  # the result is an average over about that part of the steps, the last ones
LEAST = 1e-6  # of a probability whose logarithm is taken

Texts = tuple[Tensor, Tensor, Tensor, Tensor]  # see :func:`write_texts`


@dataclass(frozen=True)
class DistillReport:
    """The student's checkpoint ``output``, the teacher's ``layers`` that it began with, ``steps`` of the training in
    all runs, ``tokens`` that the teacher wrote for it, and ``before`` and ``after`` it the share of the teacher's
    greedy tokens that the student finds most probable, too, after prompts that were left out."""

    output: Path
    layers: tuple[int, ...]
    steps: int
    tokens: int
    before: float
    after: float


def distill(
    source: Path,
    output: Path,
    *,
    student: int,
    text: Path,
    open_pair: Callable[[Path, int, str, Tensor | None], Any],
    narrow: bool = False,
    minutes: float = 30.0,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> DistillReport:
    """Train a student of ``student`` layers on what the exported decoder ``source`` says, and write its checkpoint.

    A ``narrow`` one has half of the neurons and, where KV heads are even, half of the attention heads. Where
    ``output`` holds an earlier run of the same arguments it goes on, until ``steps`` in all if these are given, else
    for ``minutes``; a step that was begun is finished, and the texts that the teacher writes before it. The last tenth
    of ``text``, plain or chats as JSONL, is left out. ``open_pair`` opens teacher and student; the command line passes
    :class:`llmc.export.student.Student`.

    Raises:
        UsageError: ``output`` is something else, or the text is too short.
        CheckpointError: the export, or what an earlier run kept, is broken, or its layers make no student.
    """
    export = read_export(source)
    torch.set_num_threads(usable_threads())
    vocabulary = export.geometry.vocab_size
    prompts = read_samples(text, source, samples=1 << 30, length=PROMPT, vocab_size=vocabulary, remedy="")
    folder, device = output / RUN, "cuda" if torch.cuda.is_available() else "cpu"
    if output.exists() and not (folder / STATE).exists() and not set(os.listdir(output)) <= {RUN}:
        raise UsageError("output", f"{output} exists, and no distillation made it", "choose another output folder")
    parts = np.split(prompts.ids, [-max(1, len(prompts.ids) // 10)])  # the last one is left out
    pair = open_pair(source, student, device, torch.from_numpy(parts[0][:ROWS]) if narrow else None)
    arguments = {"student": student, "narrow": narrow, "text": prompts.sha256, "seed": seed}
    identity = {"teacher": export.source.fingerprint, **arguments}
    if not (folder / STATE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        pair.write(folder)  # what cannot be written is refused now
    state = _keep(folder / STATE, lambda: {"identity": identity, "steps": 0})
    if others := [name for name, it in identity.items() if state["identity"].get(name) != it]:
        raise UsageError(
            "output",
            f"{output} was begun with another value of {' and '.join(others)}",
            "go on with that, or choose another output folder",
        )
    progress("the model writes")
    run, lost, began = _Run(pair, folder, state, parts, export.generation.eos_token_ids), 0.0, time.monotonic()
    while (done := run.steps / steps if steps else (time.monotonic() - began) / (60 * minutes)) < 1:
        progress(f"step {run.steps}, divergence {lost:.2f}", done)
        lost = run.train()
    run.save()
    after, tokens = run.finish(), len(run.texts) * ROWS * (LENGTH - PROMPT)
    pair.write(output)
    return DistillReport(output, pair.layers, run.steps, tokens, state["before"], after)


class _Run:
    """The training, from where an earlier one was saved: ``steps`` of it are done, on ``texts`` of some rounds."""

    def __init__(
        self, pair: Any, folder: Path, state: dict[str, Any], prompts: list[Ids], stops: Sequence[int]
    ) -> None:
        self._teacher, self._student, self._folder, self._state = pair.teacher, pair.model, folder, state
        self._stops, self._device = torch.tensor(stops), pair.model.model.norm.weight.device
        self._bfloat16 = self._device.type == "cuda" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))
        self._trained = nn.ModuleList((pair.model.model.layers, pair.model.model.norm))
        self._average = AveragedModel(
            self._trained, avg_fn=lambda mean, new, steps: mean.lerp(new, 1 - (1 - 1 / (int(steps) + 1)) ** AVERAGED)
        )
        self._optimizer = torch.optim.Adam(self._trained.parameters(), RATE, betas=BETAS)
        self._parts: dict[str, Any] = {"trained": self._trained, "average": self._average, "optimizer": self._optimizer}
        self._prompts, greedy = prompts[0], prompts[1][:ROWS]
        self._judged = self._write("judged", greedy, np.zeros(len(greedy)))
        if "before" not in state:
            state["before"] = self.finish()
        self.steps: int = state["steps"]
        for name, part in self._parts.items() if self.steps else ():
            part.load_state_dict(state[name])
        self.texts = [self._write_round(number) for number in range(-(-self.steps // STEPS))]

    def save(self) -> None:
        states = {name: part.state_dict() for name, part in self._parts.items()}
        _save(self._folder / STATE, self._state | {"steps": self.steps} | states)

    def train(self) -> float:
        """Make the next step, for which the teacher may have to write texts first; the divergence."""
        if len(self.texts) * STEPS == self.steps:
            self.save()
            self.texts.append(self._write_round(len(self.texts)))
        self._optimizer.param_groups[0]["lr"] = RATE * min(1.0, (self.steps + 1) / WARM_UP)
        chosen = self._rng("step", self.steps).integers(len(self.texts) * ROWS, size=BATCH).tolist()
        batch = [torch.stack([self.texts[row // ROWS][kind][row % ROWS] for row in chosen]) for kind in range(4)]
        lost, count = 0.0, batch[-1].sum().item()
        for ids, tokens, logs, counted in self._cut(batch):
            loss = divergence(self._logits(ids), tokens.long(), logs.float(), counted) / count
            loss.backward()  # type: ignore[no-untyped-call]
            lost += loss.item()
        nn.utils.clip_grad_norm_(self._trained.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._average.update_parameters(self._trained)
        self.steps += 1
        return lost

    @torch.inference_mode()
    def finish(self) -> float:
        """Give the student its average weights; the share of greedy tokens that it finds most probable, too."""
        self._trained.load_state_dict(self._average.module.state_dict())
        right, count = 0, self._judged[-1][:, PROMPT - 1 :].sum().item()
        for ids, _, _, counted in self._cut(self._judged):
            same = (self._logits(ids).argmax(-1) == ids[:, 1:]) & counted
            right += int(same[:, PROMPT - 1 :].sum())
        return right / max(count, 1)

    def _cut(self, texts: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Texts on the device, as many as are computed at once."""
        return zip(*(torch.split(each.to(self._device), AT_ONCE) for each in texts), strict=True)

    def _logits(self, ids: Tensor) -> Tensor:
        """Texts (B, L) -> the student's logits (B, L - 1, V) after each token but the last."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            logits: Tensor = feed(self._student, ids[:, :-1], 0, self._student.empty_caches(len(ids), LENGTH - 1))[0]
        return logits.float()

    def _write_round(self, number: int) -> Texts:
        """Texts after the next prompts, in an order of chance that begins anew after the last one."""
        order = self._rng("order", 0).permutation(len(self._prompts))
        chosen = order[np.arange(number * ROWS, (number + 1) * ROWS) % len(order)]
        return self._write(f"texts-{number:05d}", self._prompts[chosen], np.linspace(0, 1, ROWS))

    def _write(self, name: str, prompts: Ids, heat: NDArray[np.float64]) -> Texts:
        given, noise = torch.from_numpy(prompts).to(self._device), self._rng(name, 0)
        make = partial(write_texts, self._teacher, given, heat, self._stops, noise)
        found: Texts = _keep(self._folder / f"{name}.pt", make)
        return found

    def _rng(self, use: str, number: int) -> np.random.Generator:
        return np.random.default_rng([self._state["identity"]["seed"], number, *use.encode()])


@torch.inference_mode()
def write_texts(
    teacher: Any, prompts: Tensor, heat: NDArray[np.float64], stops: Tensor, noise: np.random.Generator
) -> Texts:
    """Texts of a decoder after prompts (R, P) at temperatures (R): ids (R, L), prompts and all; after each but the
    last the most probable tokens (R, L - 1, T), the logarithms of their probabilities, and whether they count
    (R, L - 1), for none does after the first of ``stops``."""
    ids, caches, found, fed = prompts, teacher.empty_caches(len(prompts), 0), list[tuple[Tensor, Tensor]](), 0
    while fed < LENGTH - 1:
        new = ids[:, fed : fed + PIECE]
        if fed % GROWTH == 0:
            caches = [tuple(pad(each, (0, 0, 0, GROWTH)) for each in layer) for layer in caches]
        logits, caches, *_ = feed(teacher, new, fed, caches)
        values, tokens = logits.topk(TOP)
        logs = values - logits.logsumexp(-1, keepdim=True)
        found.append((tokens.int().cpu(), logs.half().cpu()))
        fed += new.shape[1]
        if fed == ids.shape[1]:
            gumbel = noise.gumbel(size=logs[:, -1].shape)  # with it the largest is a sample
            drawn = torch.from_numpy((logs[:, -1].cpu().numpy() + heat[:, None] * gumbel).argmax(-1)).to(ids.device)
            ids = torch.cat((ids, tokens[:, -1].gather(1, drawn[:, None])), 1)
    ids, (tops, logarithms) = ids.cpu(), (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    ended = torch.isin(ids[:, PROMPT:-1], stops).cumsum(1) > 0
    return ids, tops, logarithms, ~pad(ended, (PROMPT, 0))


def divergence(logits: Tensor, tokens: Tensor, logs: Tensor, counted: Tensor) -> Tensor:
    """KL(teacher || student) in nats, summed over the positions that are counted (B, S): of logits (B, S, V), where of
    the teacher the log-probabilities ``logs`` of ``tokens`` (B, S, T) are known, and all others are taken as one."""
    student = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
    rest, own_rest = ((1 - each.exp().sum(-1)).clamp_min(LEAST) for each in (logs, student))
    kept = (logs.exp() * (logs - student)).sum(-1)
    return ((kept + rest * (rest.log() - own_rest.log())) * counted).sum()


def feed(model: Any, ids: Tensor, start: int, caches: list[tuple[Tensor, ...]]) -> Any:
    """Tokens (B, S) at positions from ``start`` -> logits (B, S, V), caches and what else a decoder gives."""
    indices = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    return model(ids, torch.full((len(ids),), start, device=ids.device), indices, caches)


def _save(path: Path, value: Any) -> None:
    with replace_file(path, f".{path.name}-") as file:
        torch.save(value, file)


def _keep(path: Path, make: Callable[[], Any]) -> Any:
    """Read a value from its file, or make and keep it. Raises CheckpointError: the file is broken."""
    if not path.exists():
        _save(path, make())
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # a broken pickle may raise any
        raise CheckpointError(f"{path} is broken; remove {path.parent.parent} and begin anew") from error
