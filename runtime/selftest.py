"""Golden prompts replayed: a bundle has to compute here what it computed where it was built."""

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llmc
from llmc.bundle import GoldenPrompt, GoldenVector, Manifest
from llmc.bundle.model.vision import Vision
from llmc.errors import BundleError
from llmc.runtime.api.request import Request
from llmc.runtime.host import disk_cache
from llmc.runtime.host.machine import cpu_flags
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sessions import Batch, Phase, Session
from llmc.runtime.sessions.onnxruntime.library import SESSION_CONFIG
from llmc.runtime.vision.patches import make_feeds

log = logging.getLogger(__name__)

# What a build records as its bundle's tolerance. Logits of the same graph on another CPU: float32 kernels add in
# another order (about 1e-4), and a different rounding of one activation to int8 moves a logit by about 1e-2. A wrong
# weight or a saturated product moves it by far more.
LOGIT_TOLERANCE = 0.25
# The same for graphs on GPUs, by what they compute in: recorded on a CPU, whose kernels for 16 bits round where they
# hand values on, and not within sums. Not tried on a GPU yet.
LOGIT_TOLERANCES = {"float32": 0.25, "float16": 0.5, "bfloat16": 1.0}
# Of vectors and scores, as :func:`difference` has it. A wrong weight moves vectors by some tenths of their length; the
# rounding of activations inside kernels for integer weights, on another CPU, by less than a hundredth.
VECTOR_TOLERANCE = 0.05
# Values of a vector, or of a tile's rows, that are recorded: what is wrong in one of them is so in most.
KEPT_VALUES = 256
# Decode steps per golden prompt at load: enough to run the decode graph on a cache that both graphs filled.
QUICK_TOKENS = 4
# Decode steps behind the start of a long golden prompt, and after it.
LONG_STEPS = 32
# Golden prompts at a load that nobody asked to test, the shortest: each one runs every node of both graphs.
QUICK_PROMPTS = 1
KIND = "selftest"
STAGE_TOKENS = 8  # of the made-up prompt of a stage, and of a draft head


@dataclass(frozen=True)
class VerifyReport:
    """Counts of what was checked. ``largest_difference`` is between logits here and when the bundle was built;
    ``unlisted`` are the first 16 names in the folder that the manifest does not list."""

    files: int
    prompts: int
    tokens: int
    equal_tokens: int
    largest_difference: float
    unlisted: tuple[str, ...] = ()


def check_once(model: Any, wanted: bool | None) -> None:
    """Replay the golden prompts in short: always, never, or (None) the shortest of them, unless a pass is remembered.
    An engine on its GPU replays them whole, for it may have been judged by its graph on a CPU.

    A pass holds for these files, this processor and engine version; a failure is not remembered.
    """
    if wanted is False or (wanted is None and not (model.manifest.golden or model.manifest.vectors)):
        return

    def check() -> None:
        start = time.perf_counter()
        on_gpu = model.manifest.engine is not None and model.manifest.device is not None
        limit, prompts = (None, None) if on_gpu else (QUICK_TOKENS, QUICK_PROMPTS if wanted is None else None)
        log.info("checking %s on this machine%s", model.folder, ", once" if wanted is None else "")
        replay(model, limit=limit, prompts=prompts)
        log.info("%s passed its self-test in %.2f s", model.folder, time.perf_counter() - start)

    disk_cache.once(KIND, _key(model), check, always=bool(wanted))


def _key(model: Any) -> str:
    """A hash of the manifest, this machine, and the size and time of change of every file that is computed with."""
    files = sorted(model.folder.iterdir())
    found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    machine = [model.engine_version, model.processor, platform.machine(), cpu_flags(), SESSION_CONFIG]
    parts = [asdict(model.manifest), llmc.__version__, machine, found]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def replay(
    model: Any,
    progress: Callable[[str], None] = lambda step: None,
    *,
    limit: int | None = None,
    prompts: int | None = None,
    long: bool = True,
) -> VerifyReport:
    """Run the golden prompts on a loaded bundle: the ``prompts`` shortest, with up to ``limit`` tokens after each; all
    of them by default. Without ``long`` leave out those that are long."""
    if model.manifest.geometry.encoder:
        return _replay_vectors(model, progress, prompts)
    if model.manifest.geometry.head:
        return _replay_head(model)
    cases = tuple(case for case in model.manifest.golden if long or len(case.prompt) <= 2 * LONG_STEPS)
    if not cases:
        raise BundleError("the manifest has no golden prompts", "build the bundle again", path=model.folder)
    largest, equal, compared = 0.0, 0, 0
    for number, case in enumerate(cases, 1):
        _check(model, case, number)
    chosen = sorted(cases, key=lambda case: len(case.prompt))[:prompts] if prompts else cases
    for number, case in enumerate(chosen, 1):
        progress(f"golden prompt {number} of {len(chosen)}")
        largest = max(largest, _first_logits(model, case))
        wanted = case.tokens[:limit]
        compared += len(wanted)
        equal += _same_tokens(model, case, wanted)
    if model.manifest.geometry.vision is not None:
        progress("golden image")
        _replay_image(model)
    return VerifyReport(len(model.manifest.files), len(chosen), compared, equal, largest)


def difference(found: NDArray[np.float32], recorded: NDArray[np.float32]) -> float:
    """Distance of two vectors [n], as a share of the second one's length where that is above one."""
    return float(np.linalg.norm(found - recorded) / max(1.0, float(np.linalg.norm(recorded))))


def make_image(vision: Vision) -> dict[str, NDArray[Any]]:
    """Inputs of the tower for a made-up image of slanted stripes, the same on every machine: a tile, or one with more
    rows and columns of squares than a window."""
    side, square = max(vision.patching.window, 3) if vision.patching else 0, vision.square
    size = ((side + 1) * square, (side + 2) * square) if vision.patching else (vision.tile, vision.tile)
    colors, rows, columns = np.indices((3, *size))
    return make_feeds(((85 * colors + 5 * rows + 3 * columns) % 256).astype(np.uint8), vision)


def sample_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values [n] of an image's rows that are recorded, some of each row."""
    return rows.ravel()[:: max(1, rows.size // KEPT_VALUES)][:KEPT_VALUES]


def run_stage(session: Session, manifest: Manifest) -> NDArray[np.float32]:
    """Values [n] of the hidden states that a stage before the last makes of made-up ones, in a prompt and a step."""
    hidden = np.random.default_rng(0).standard_normal((1, STAGE_TOKENS, manifest.geometry.hidden_size), np.float32)
    ids, past, nothing = np.arange(STAGE_TOKENS)[None], np.zeros(1, np.int64), np.zeros((1, 0), np.int64)
    session.cache.reserve(1, STAGE_TOKENS + 1)
    prompt = session.run(Batch.of(Phase.PREFILL, ids, past, nothing, hidden=hidden))
    step = session.run(Batch.of(Phase.DECODE, ids[:, -1:], past + STAGE_TOKENS, nothing, hidden=hidden[:, -1:]))
    return sample_rows(np.concatenate([prompt[0], step[0]]))


def replay_stage(folder: Path, manifest: Manifest, session: Session) -> VerifyReport:
    """Compare a stage before the last, which answers nothing, with what it computed where it was built."""
    apart = _compare(folder, "hidden states", manifest.vectors[0], run_stage(session, manifest))
    return VerifyReport(len(manifest.files), 0, 0, 0, apart)


def run_head(session: Session, manifest: Manifest) -> list[NDArray[np.float32]]:
    """Values [n] of the hidden states and of the logits that a draft head makes of made-up ones, in a prompt and a
    step."""
    geometry, found = manifest.geometry, list[tuple[NDArray[np.float32], ...]]()
    rows = np.random.default_rng(0).standard_normal((STAGE_TOKENS + 1, geometry.row_width), np.float32)
    ids = np.arange(len(rows))[None] % geometry.vocab_size
    session.cache.reserve(1, len(rows))
    if geometry.borrows:
        (count,), dtype = session.cache.form(len(rows))
        session.cache.write(0, 0, len(rows), np.random.default_rng(1).standard_normal(count).astype(dtype))
    for phase, part in ((Phase.PREFILL, slice(STAGE_TOKENS)), (Phase.DECODE, slice(STAGE_TOKENS, None))):
        places = np.arange(len(rows[part]))[None]
        past = np.full(1, part.start or 0)
        call = Batch.of(phase, ids[:, part], past, places, embedding_indices=places, embeddings=rows[part])
        logits = session.run(call)[0]
        assert session.hidden is not None, "a head gives its hidden states"
        found.append((session.hidden[0].copy(), logits[np.isfinite(logits)]))
    return [sample_rows(np.concatenate([it.ravel() for it in parts])) for parts in zip(*found, strict=True)]


def _replay_head(model: Any) -> VerifyReport:
    """Compare a draft head, whose guesses are no text, with what it computed where it was built."""
    found, cases = run_head(model.runner.session, model.manifest), model.manifest.vectors
    if len(cases) != len(found):
        raise BundleError(
            "the manifest has no golden values of a draft head", "build the bundle again", path=model.folder
        )
    named = zip(("hidden states", "logits"), cases, found, strict=True)
    apart = max(_compare(model.folder, what, case, values) for what, case, values in named)
    return VerifyReport(len(model.manifest.files), 0, 0, 0, apart)


def _compare(folder: Path, what: str, case: GoldenVector, found: NDArray[np.float32]) -> float:
    """The distance of values [n] from recorded ones; BundleError beyond the tolerance, or where no build wrote them."""
    recorded = np.array(case.values, np.float32)
    if case.prompt or recorded.shape != found.shape or not np.isfinite(recorded).all():
        raise _corrupt(folder, f"vector ({what})")
    apart = difference(found, recorded)
    if not apart <= VECTOR_TOLERANCE:
        raise BundleError(
            f"{what} differ by {apart:.3g} from those recorded when it was built, at most "
            f"{VECTOR_TOLERANCE} is expected",
            "this machine computes something else: build the bundle on it",
            path=folder,
        )
    return apart


def _replay_image(model: Any) -> None:
    """Refuse a tower that makes other rows of the made-up image than were recorded."""
    (case,) = model.manifest.vectors or (GoldenVector((), ()),)
    image = make_image(model.manifest.geometry.vision)
    _compare(model.folder, "rows of an image", case, sample_rows(model.tower.run(**image)))


def _replay_vectors(model: Any, progress: Callable[[str], None], prompts: int | None) -> VerifyReport:
    """:func:`replay` of a model that embeds or ranks."""
    cases, tolerance = model.manifest.vectors, model.manifest.golden_tolerance
    if not cases:
        raise BundleError("the manifest has no golden texts", "build the bundle again", path=model.folder)
    largest, vocab = 0.0, model.manifest.geometry.vocab_size
    cases = tuple(sorted(cases, key=lambda case: len(case.prompt))[:prompts]) if prompts else cases
    for number, case in enumerate(cases, 1):
        progress(f"golden text {number} of {len(cases)}")
        values = np.array(case.values, np.float32)
        sound = (
            0 < len(case.prompt) <= model.max_context
            and 0 < len(values) == min(KEPT_VALUES, model.width)
            and all(0 <= token < vocab for token in case.prompt)
            and np.isfinite(values).all()
        )
        if not sound:
            raise _corrupt(model.folder, f"text {number}")
        apart = difference(model.encode([case.prompt])[0, : len(values)], values)
        if not apart <= tolerance:
            raise _differs(model, f"a vector differs by {apart:.3g} from that")
        largest = max(largest, apart)
    return VerifyReport(len(model.manifest.files), len(cases), 0, 0, largest)


def _check(model: Any, case: GoldenPrompt, number: int) -> None:
    """Refuse a case that no build wrote: the manifest is not hashed, and NaN, for one, would compare as a near tie."""
    ids = (*case.prompt, *case.tokens, *case.top_ids)
    numbers = (*case.margins, *case.top_logits)
    sound = (
        len(case.prompt) > 0
        and len(case.tokens) == len(case.margins) > 0
        and len(case.top_ids) == len(case.top_logits) > 0
        and all(0 <= token < model.manifest.geometry.vocab_size for token in ids)
        and all(map(math.isfinite, numbers))
        and len(case.prompt) + len(case.tokens) <= model.runner.max_context
    )
    if not sound:
        raise _corrupt(model.folder, f"prompt {number}")


def _corrupt(folder: Path, what: str) -> BundleError:
    return BundleError(f"golden {what} of the manifest is corrupt", "build the bundle again", path=folder)


def _differs(model: Any, what: str) -> BundleError:
    return BundleError(
        f"{what} recorded when it was built, at most {model.manifest.golden_tolerance} is expected",
        "this machine computes something else: build the bundle on it",
        path=model.folder,
    )


def _first_logits(model: Any, case: GoldenPrompt) -> float:
    """Largest difference between the top logits after the prompt and the recorded ones."""
    recorded = np.array(case.top_logits, np.float32)
    tolerance = model.manifest.golden_tolerance
    # As views that the next call overwrites, so look at one after the other.
    differences = []
    for logits in _ways(model, case):
        difference = float(np.abs(logits[list(case.top_ids)] - recorded).max())
        # NaN compares false with everything, so ask for what must hold.
        if not difference <= tolerance:
            raise _differs(model, f"logits differ by {difference:.3g} from those")
        differences.append(difference)
    return differences[0]


def _ways(model: Any, case: GoldenPrompt) -> Iterator[NDArray[np.float32]]:
    """Logits [V] after the prompt: fed alone, and, where prompts may share a call, beside a shorter one; of a long
    one also with its last tokens in decode steps."""
    runner, prompt = model.runner, case.prompt
    yield runner.prefill(prompt)[0, -1]
    if len(prompt) > 2 * LONG_STEPS:
        *_, logits = decode_tokens(runner, prompt, LONG_STEPS)
        yield logits
    shares = runner.session.packs_rows and model.manifest.limits.max_batch > 1
    if shares and 1 < len(prompt) <= runner.prefill_chunk // 2:
        yield runner.prefill_beside(prompt[: len(prompt) // 2], prompt)


def decode_tokens(runner: Any, prompt: Sequence[int], count: int) -> Iterator[NDArray[np.float32]]:
    """Feed a prompt with its last ``count`` tokens one by one; the logits [V] after each of these, as views."""
    start = len(prompt) - count
    runner.prefill(prompt[:start])
    for position in range(start, len(prompt)):
        yield runner.step(prompt[position], position)[0, -1]


def answer_greedily(model: Any, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The ``count`` tokens after a prompt that the logits alone choose, whatever the checkpoint's defaults are."""
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    tokens: tuple[int, ...] = model.submit(Request(prompt, params)).result().token_ids
    return tokens


def _same_tokens(model: Any, case: GoldenPrompt, tokens: tuple[int, ...]) -> int:
    """Count the greedy tokens that equal the recorded ones, up to a near tie that was decided differently."""
    answer = answer_greedily(model, case.prompt, len(tokens))
    for i, (here, there, margin) in enumerate(zip(answer, tokens, case.margins, strict=False)):
        if here != there and margin > 2 * model.manifest.golden_tolerance:
            raise BundleError(
                f"greedy token {i} of a golden prompt is {here}, {there} was recorded with a lead of {margin:.3g}",
                "this machine computes something else: build the bundle on it",
                path=model.folder,
            )
        if here != there:
            return i
    return len(tokens)
