"""Stages of a model as actors of Ray, in processes of this machine: answers of the whole, and stages that are lost."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.stages import cut

pytest.importorskip("ray.serve", reason="needs Ray Serve")

import ray

from llmc.bundle import read_bundle
from llmc.errors import BundleError, ResourceError
from llmc.runtime import Model, load
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.fleet.calls import BILL, make_call
from llmc.runtime.server.fleet.cluster import replicas_of
from llmc.runtime.server.fleet.replica import Replica
from llmc.runtime.server.fleet.run import find_cause
from llmc.runtime.server.fleet.stages import SHARE, StagesOnRay, find_place
from llmc.runtime.sessions import Batch, Phase

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

# Of logits, where float16's 11 bits flip few of an int8 graph's roundings: as much as one of those moves (0.01).
WIRE_TOLERANCE = 0.1
PROMPTS = ["def f(x):\n    return x", "import os\n" * 30]
OPTIONS: dict[str, Any] = {"threads": 1, "determinism": "strict", "self_test": False}
LOST = "stage {} of the model was lost, and what it held of the prompt; it is started anew: ask again"


@pytest.fixture(scope="module")
def chain(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut(tiny_bundle, tmp_path_factory.mktemp("cut") / "chain")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A box that has the names of a stage before the last, and of the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # processes for work that never comes
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.setenv("RAY_worker_niceness", "0")  # or another test process beside this one starves them
        boxes = {"stage-0": 1, "stage-2": 1}
        quiet = {"log_to_driver": False, "include_dashboard": False, "object_store_memory": 80 << 20}
        ray.init("local", num_cpus=2, resources=boxes, **quiet)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def strict(chain: Path, cluster: None) -> Iterator[Model]:
    """The model in stages; each stage is a process that takes seconds to start, so tests share them."""
    with load(chain, stages=StagesOnRay, **OPTIONS) as model:
        yield model


@pytest.fixture(scope="module")
def fast(chain: Path, cluster: None) -> Iterator[Model]:
    with load(chain, stages=StagesOnRay, **OPTIONS | {"determinism": "fast"}) as model:
        yield model


def answers(model: Model) -> list[tuple[int, ...]]:
    return [model.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True).token_ids for prompt in PROMPTS]


def test_a_lost_stage_fails_those_who_run_and_later_requests_get_the_answers_of_the_whole(tiny_bundle, strict):
    with load(tiny_bundle, **OPTIONS) as whole:
        wanted = answers(whole)
    assert answers(strict) == wanted
    running = [strict.stream(PROMPTS[0], max_tokens=1500, temperature=0, ignore_eos=True) for _ in range(2)]
    assert [next(iter(stream)) for stream in running]
    session: Any = strict.runner.session
    ray.kill(session._stages._actors[0])
    for stream in running:
        with pytest.raises(ResourceError, match=LOST.format(0)):
            stream.result()
    assert answers(strict) == wanted


def test_hidden_states_are_halves_on_the_wire_at_fast_alone(strict, fast):
    found = []
    batch = Batch.of(Phase.PREFILL, np.arange(5, 45)[None], np.zeros(1, np.int64), np.array([[39]]))
    for model in (strict, fast):
        session: Any = model.runner.session
        session.cache.reserve(1, 64)
        wire = ray.get(session._stages.submit(batch))
        arrays = wire if isinstance(wire, tuple) else (wire,)
        found.append((sum(array.nbytes for array in arrays), session.run(batch).copy()))
    (whole, wanted), (half, logits) = found
    assert half == whole // 2 + 40 * 4  # and four bytes a token
    assert 0 < np.abs(logits - wanted).max() < WIRE_TOLERANCE


def test_groups_that_take_turns_get_the_answers_of_whole_steps_and_a_lost_stage_ends_them_all(fast):
    """Four rows, and twice two: even numbers, of which each row has the same bits."""
    runner: Any = fast.engine._runner
    turns, sizes = runner._ahead, list[tuple[int, int]]()

    def ask(tokens: int) -> list[Any]:
        handles: list[Any] = []
        greedy = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        fast.engine.call(lambda: handles.extend(fast.stream(f"{PROMPTS[0]} + {i}", **greedy) for i in range(4)))
        return handles

    def answer() -> list[tuple[int, ...]]:
        return [handle.result().token_ids for handle in ask(30)]

    runner._ahead = None
    wanted = answer()
    runner._ahead, begin = turns, turns._begin
    turns._begin = lambda group, rows: sizes.append((len(group), rows)) or begin(group, rows)
    assert answer() == wanted and (2, 4) in sizes
    running = ask(1500)
    assert [next(iter(stream)) for stream in running]
    session: Any = runner.session
    ray.kill(session._stages._actors[1])
    for stream in running:
        with pytest.raises(ResourceError, match=LOST.format(1)):
            stream.result()
    assert answer() == wanted


def test_a_stage_that_cannot_be_opened_says_why_where_the_model_is_loaded(chain):
    manifest = read_bundle(chain)
    other = replace(manifest, stage=replace(manifest.stage, before=("0" * 64, *manifest.stage.before[1:])))
    with pytest.raises(BundleError, match="stage-0 is of another build"):
        StagesOnRay(chain, other, 1, exact=True)


def test_a_stage_runs_on_the_box_that_has_its_name(chain):
    assert [find_place(number) for number in range(3)] == [{"stage-0": SHARE}, {}, {"stage-2": SHARE}]
    deployed = replicas_of(ServerConfig(models={"m": chain}, ray=True, threads=1))
    assert deployed._bound_deployment.ray_actor_options["resources"] == {"stage-2": SHARE}


def test_of_a_message_of_rays_the_cause_is_told_without_the_traceback():
    cause = "chain/stage-0 is not there; put this stage there"
    said = f"failed to start. Error: ray::Replica()\n  File 'x.py'\n    raise\nllmc.errors.BundleError: {cause}\n"
    assert find_cause(said) == cause and find_cause("no node has the CPUs") == "no node has the CPUs"


async def test_a_replica_serves_the_stages_and_tells_clients_that_one_was_lost(chain):
    replica = Replica(ServerConfig(threads=1, determinism="strict"))
    await replica.reconfigure({"models": {"m": str(chain)}, "revision": ""})

    async def complete(tokens: int) -> tuple[int, dict[str, Any]]:
        head: dict[str, Any] = {"type": "http", "path": "/v1/completions", "query_string": b""}
        sent = {"prompt": PROMPTS[0], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        call = make_call({**head, "headers": [(b"content-type", b"application/json")]}, json.dumps(sent).encode())
        found = replica.answer(call.scope, call.body)
        start, body = [it async for several in found for it in several if it["type"] != BILL]
        return start["status"], json.loads(body["body"])

    try:
        assert (await complete(5))[1]["usage"]["completion_tokens"] == 5
        session: Any = replica._ready_pool.models()["m"].runner.session
        ray.kill(session._stages._actors[1])
        status, refused = await complete(5)
        assert (status, refused["error"]["message"]) == (503, LOST.format(1))
        assert (await complete(5))[0] == 200
    finally:
        await replica.close()
