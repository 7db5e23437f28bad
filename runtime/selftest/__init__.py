"""Golden results replayed: a bundle has to compute here what it computed where it was built."""

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import llmc
from llmc.bundle.model.kinds import find_evidence
from llmc.runtime.host import disk_cache
from llmc.runtime.host.machine import cpu_flags
from llmc.runtime.selftest.encoders import replay_texts
from llmc.runtime.selftest.heads import replay_head
from llmc.runtime.selftest.images import replay_tower
from llmc.runtime.selftest.prompts import replay_prompts
from llmc.runtime.selftest.values import VerifyReport
from llmc.runtime.sessions.onnxruntime.library import SESSION_CONFIG

log = logging.getLogger(__name__)

# Decode steps per golden prompt at load: enough to run the decode graph on a cache that both graphs filled.
QUICK_TOKENS = 4
# Golden prompts at a load that nobody asked to test, the shortest: each one runs every node of both graphs.
QUICK_PROMPTS = 1
KIND = "selftest"


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
    """Run the golden results of a loaded bundle: the ``prompts`` shortest, with up to ``limit`` tokens after each; all
    of them by default. Without ``long`` leave out those that are long."""
    match find_evidence(model.manifest.geometry):
        case "texts":
            return replay_texts(model, progress, prompts)
        case "values":
            return replay_head(model)
    report = replay_prompts(model, progress, limit, prompts, long)
    replay_tower(model, progress)
    return report
