"""Models share one plan of memory: each is loaded once, waits for room in a bounded way, and is swapped unnoticed."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.plans import plan_of
from doubles.refusals import about

from llmc.bundle import ADAPTERS_FOLDER, Manifest, write_manifest
from llmc.bundle.model.encoder import Encoder
from llmc.errors import BundleError, EngineClosedError, GpuError, RequestError, ResourceError, UsageError
from llmc.publish import file_entries
from llmc.runtime import load
from llmc.runtime.loaded import LoadedBundle
from llmc.runtime.loading import memory_need
from llmc.runtime.server.http.errors import from_llmc
from llmc.runtime.server.models import loading as module
from llmc.runtime.server.models.pool import Pool

SIZE = 1000  # bytes that each model of these tests needs
OPTIONS = {"prefix_cache_bytes": 0, "max_batch": 1}
WAIT_S = 20.0  # for what happens at once, on a machine that does much else


class Loaded:
    """A model that does nothing, and notes when it is closed."""

    def __init__(self, folder: Path, manifest: Manifest, memory: int | None, options: dict[str, Any]) -> None:
        self.folder, self.manifest, self.memory, self.options = folder, manifest, memory, options
        self.closed = threading.Event()
        self.engine = self.chat_template = object()
        self.planned_bytes = manifest.memory.total(0)
        self.adapters = set(options["adapters"])

    def load_adapter(self, name: str, folder: Path) -> None:
        if not (folder / "adapter.json").exists():
            raise BundleError("it is damaged", path=folder)
        self.adapters.add(name)

    def unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise RequestError(f"there is no adapter {name!r}")
        self.adapters.remove(name)

    def close(self, drain: bool = False) -> None:
        self.closed.set()


class Loader:
    """What takes the place of ``load``: it notes every model, and waits or fails where told to."""

    def __init__(self, manifest: Callable[[Path], Manifest]) -> None:
        self.loaded: list[Loaded] = []
        self.before: Callable[[Path], object] = lambda folder: None
        self._manifest = manifest

    def __call__(self, folder: Path, *, memory: int | None, **options: Any) -> Loaded:
        self.before(folder)
        self.loaded.append(Loaded(folder, self._manifest(folder), memory, options))
        return self.loaded[-1]

    @property
    def names(self) -> list[str]:
        return [model.folder.name for model in self.loaded]


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    loader = Loader(module.read_bundle)
    monkeypatch.setattr(module, "load", loader)
    return loader


@pytest.fixture
def folders(tmp_path: Path, manifest: Manifest) -> dict[str, Path]:
    """Three bundles without anything to run, of SIZE bytes each."""
    plan = plan_of(engine=0, tokenizer=0, logits=0, weights=SIZE)
    found = {}
    for name in "abc":
        found[name] = tmp_path / name
        found[name].mkdir()
        publish(
            found[name],
            replace(
                manifest,
                memory=plan,
                recipe=replace(manifest.recipe, activations="none"),
                source=replace(manifest.source, name=name),
            ),
        )
    return found


def publish(folder: Path, manifest: Manifest) -> None:
    """Put a manifest into a folder, as another publication each time."""
    files = {"tokenizer.json": "{}", "decode.onnx": ""}
    for name, text in files.items():
        (folder / name).write_text(text)
    write_manifest(replace(manifest, files=file_entries(folder, files)), folder)
    written = folder / "llmc.json"
    os.replace(shutil.copy(written, folder / "next"), written)


Make = Callable[..., Pool]


@pytest.fixture
def make(folders: dict[str, Path], loader: Loader) -> Make:
    def made(names: str = "abc", memory: int | None = 2 * SIZE, **options: Any) -> Pool:
        patience_s = options.pop("patience_s", WAIT_S)
        bundles = {name: folders[name] for name in names}
        return Pool(bundles, memory=memory, load_options=OPTIONS | options, patience_s=patience_s)

    return made


async def use(pool: Pool, *names: str) -> None:
    for name in names:
        async with pool.lease(name):
            pass


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


class Held:
    """A request that holds a model until it is let go."""

    def __init__(self, pool: Pool, name: str) -> None:
        self._let_go, self.model = asyncio.Event(), asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(pool, name))

    async def _hold(self, pool: Pool, name: str) -> None:
        async with pool.lease(name) as model:
            self.model.set_result(model)
            await self._let_go.wait()

    async def end(self) -> None:
        self._let_go.set()
        await self._task


async def test_each_model_gets_its_own_format_of_calls(folders, loader):
    pool = Pool(folders, memory=3 * SIZE, load_options=OPTIONS, tool_formats={"b": "hermes"})
    await use(pool, "a", "b")
    assert [model.options.get("tool_format") for model in loader.loaded] == [None, "hermes"]


class TestUnloading:
    @pytest.mark.threat("model-memory")
    async def test_lets_requests_finish_and_the_next_one_loads_anew(self, make, loader):
        pool = make()
        held = Held(pool, "a")
        first = await held.model
        await pool.place("a").unload()
        assert (pool.states()["a"].phase, pool.states()["a"].draining) == ("unloaded", 1)
        assert not first.closed.is_set() and pool.memory_taken == SIZE
        await use(pool, "a")
        assert loader.names == ["a", "a"] and not first.closed.is_set()
        await held.end()
        await until(lambda: first.closed.is_set() and pool.memory_taken == SIZE)

    async def test_of_what_is_not_loaded_does_nothing_and_of_what_is_not_there_is_refused(self, make, loader):
        pool = make()
        await pool.place("a").unload()
        assert loader.names == [] and pool.states()["a"].phase == "unloaded"
        with pytest.raises(UsageError, check=about("model")):
            await pool.place("x").unload()
        await pool.close()
        with pytest.raises(EngineClosedError):
            await pool.place("a").unload()


class TestLoading:
    async def test_is_done_once_for_all_who_ask_meanwhile(self, make, loader):
        pool = make()
        await asyncio.gather(*(use(pool, "a") for _ in range(5)))
        assert loader.names == ["a"] and pool.states()["a"].loads == 1
        assert [pool.states()[name].phase for name in "abc"] == ["ready", "unloaded", "unloaded"]

    async def test_a_client_that_leaves_while_its_model_is_loaded_takes_it_from_nobody(self, make, loader):
        pool, go = make(), threading.Event()
        loader.before = lambda folder: go.wait(WAIT_S)
        first, second = (asyncio.create_task(use(pool, "a")) for _ in range(2))
        await until(lambda: pool.states()["a"].phase == "loading")
        first.cancel()
        go.set()
        await second
        assert first.cancelled() and loader.names == ["a"]

    async def test_warms_the_first_one_unless_told_which(self, make, loader):
        await make().warm()
        await make().warm("c", "b")
        assert loader.names == ["a", "c", "b"]

    async def test_warms_several_only_where_they_fit_together(self, make, loader):
        pool = make(patience_s=0.01)
        with pytest.raises(ResourceError, match=r"c: .* others are in use;"):
            await pool.warm("a", "b", "c")

    @pytest.mark.threat("reload-flood")
    async def test_of_a_broken_bundle_fails_for_all_and_is_not_tried_again_until_another_one_is_published(
        self, make, loader, folders, manifest
    ):
        tried = []

        def broken(folder: Path) -> None:
            tried.append(folder)
            raise BundleError("the self-test failed", path=folder)

        pool = make("a")
        loader.before = broken
        results = await asyncio.gather(use(pool, "a"), use(pool, "a"), return_exceptions=True)
        assert all(isinstance(error, BundleError) for error in results)
        with pytest.raises(BundleError, match="could not be loaded a moment ago: the self-test failed"):
            await use(pool, "a")
        assert (len(tried), pool.states()["a"].phase, pool.states()["a"].reason) == (
            1,
            "failed",
            "the self-test failed",
        )
        loader.before = lambda folder: None
        publish(folders["a"], pool.manifest("a"))
        await use(pool, "a")
        assert pool.states()["a"].reason is None and pool.memory_taken == SIZE

    async def test_options_that_do_not_suit_a_bundle_are_not_its_clients_fault(self, make, loader):
        def refuse(folder: Path) -> None:
            raise UsageError("max_context", "is 9, expected 1 ... 8")

        loader.before = refuse
        with pytest.raises(BundleError, match="cannot be loaded with the options of this service: max_context"):
            await use(make("a"), "a")

    async def test_bundles_that_do_not_generate_get_no_options_of_an_engine(self, make, loader, folders, monkeypatch):
        pool = make("a", threads=3, max_queue=5, memory=None)
        manifest = pool.manifest("a")
        assert pool._loader.options_of(manifest) == {"threads": 3, "max_queue": 5, **OPTIONS}
        encoder = Encoder(result="embeddings", pooling="last", width=64, normalized=True, template=False)
        object.__setattr__(manifest, "geometry", replace(manifest.geometry, encoder=encoder))
        await use(pool, "a")
        assert loader.loaded[0].options == {"kind": LoadedBundle, "threads": 3, "adapters": {}}


class TestMemory:
    def test_a_model_that_cannot_fit_even_alone_is_refused_at_the_start(self, make):
        with pytest.raises(ResourceError, match=r"a: 1 MB are needed, 0 MB may be taken by all models"):
            make(memory=SIZE - 1)

    async def test_is_divided_where_all_fit_and_nobody_gets_more_than_it_can_use(self, make, loader):
        more = {"max_batch": 1, "prefix_cache_bytes": None}  # so that a model has use for more than SIZE
        pool = make("ab", memory=10 * SIZE, **more)
        await use(pool, "a", "b")
        assert [model.memory for model in loader.loaded] == [5 * SIZE, 5 * SIZE]
        state = pool.states()["a"]
        assert (state.memory, state.promised) == (SIZE, 5 * SIZE)
        await use(make("ab", memory=10 * SIZE), "a")
        assert loader.loaded[-1].memory == SIZE

    async def test_the_one_used_longest_ago_makes_room(self, make, loader):
        pool = make()
        await use(pool, "a", "b", "a", "c")
        assert [model.closed.is_set() for model in loader.loaded] == [False, True, False]
        assert [pool.states()[name].phase for name in "abc"] == ["ready", "unloaded", "ready"]
        await use(pool, "b")
        assert loader.names == ["a", "b", "c", "b"] and pool.memory_taken == 2 * SIZE

    @pytest.mark.threat("model-memory")
    async def test_one_in_use_stays_and_who_needs_its_room_waits_for_it(self, make, loader):
        pool = make(memory=SIZE)
        held = Held(pool, "a")
        model = await held.model
        waiting = asyncio.create_task(use(pool, "b"))
        await until(lambda: pool.states()["b"].phase == "loading")
        await asyncio.sleep(0.01)
        assert not model.closed.is_set() and not waiting.done()
        await held.end()
        await waiting
        assert model.closed.is_set() and loader.names == ["a", "b"]

    @pytest.mark.threat("model-memory")
    async def test_who_waits_too_long_is_refused(self, make):
        pool = make(memory=SIZE, patience_s=0.01)
        held = Held(pool, "a")
        await held.model
        with pytest.raises(ResourceError, match=r"b: 1 MB are missing .* others are in use;|try again"):
            await use(pool, "b")
        await held.end()
        await use(pool, "b")  # lack of memory is no reason to wait before the next attempt

    async def test_that_the_machine_lacks_is_made_by_idle_models_too(self, make, loader):
        def lack(folder: Path) -> None:
            if folder.name == "b" and not loader.loaded[0].closed.is_set():
                raise ResourceError("the GPU has 3 MB left")

        pool = make()
        loader.before = lack
        await use(pool, "a", "b")
        assert pool.states()["a"].phase == "unloaded"

    @pytest.mark.parametrize("options", [{}, {"max_context": 100}, {"prefix_cache_bytes": 1_000_000}])
    def test_the_least_is_what_load_demands(self, tiny_bundle, options):
        least = memory_need(module.read_bundle(tiny_bundle), options).least - options.get("prefix_cache_bytes", 0)
        load(tiny_bundle, memory=least, self_test=False, verify=False, **options).close()
        with pytest.raises(ResourceError):
            named = {"max_context": module.read_bundle(tiny_bundle).limits.max_context, **options}
            load(tiny_bundle, memory=least - 1, self_test=False, verify=False, **named)

    def test_a_draft_counts(self, make, folders):
        with pytest.raises(ResourceError):
            make("a", memory=2 * SIZE - 1, draft=str(folders["b"]))


class TestSwap:
    async def test_the_old_one_finishes_its_requests_beside_the_new_one_and_is_closed(self, make, loader):
        pool = make("ab")
        held = Held(pool, "a")
        old = await held.model
        await pool.place("a").swap()
        state = pool.states()["a"]
        assert (state.phase, state.users, state.draining, state.memory) == ("ready", 1, 1, 2 * SIZE)
        async with pool.lease("a") as new:
            assert new is loader.loaded[1] is not old and not old.closed.is_set()
        await held.end()
        await until(old.closed.is_set)
        await until(lambda: pool.memory_taken == SIZE)
        assert not new.closed.is_set()

    async def test_to_another_folder_holds_for_later_loads(self, make, loader, folders):
        pool = make("a", memory=SIZE)
        await pool.place("a").swap(folders["c"])
        await use(pool, "a")
        assert loader.names == ["c"] and pool.manifest("a").source.name == "c"

    async def test_to_a_bundle_that_fails_leaves_the_old_one_serving(self, make, loader):
        def fail(folder: Path) -> None:
            raise BundleError("the self-test failed", path=folder)

        pool = make("a")
        await use(pool, "a")
        loader.before = fail
        with pytest.raises(BundleError, match="self-test failed"):
            await pool.place("a").swap()
        await use(pool, "a")
        state = pool.states()["a"]
        assert (state.phase, state.reason, state.memory) == ("ready", "the self-test failed", SIZE)
        assert not loader.loaded[0].closed.is_set()

    async def test_without_memory_for_both_is_refused_and_the_old_one_goes_on(self, make, loader):
        pool = make("a", memory=SIZE)
        await use(pool, "a")
        with pytest.raises(ResourceError, match=r"a goes on with the bundle that it has; unload that first"):
            await pool.place("a").swap()
        await use(pool, "a")
        assert loader.names == ["a"] and not loader.loaded[0].closed.is_set()
        await pool.place("a").unload()
        await pool.place("a").swap()
        assert loader.loaded[0].closed.is_set() and loader.names == ["a", "a"] and pool.memory_taken == SIZE

    async def test_idle_models_make_room_for_it(self, make, loader):
        pool = make("ab")
        await use(pool, "b", "a")
        await pool.place("a").swap()
        assert pool.states()["b"].phase == "unloaded"

    async def test_refresh_takes_what_was_published_anew_and_nothing_else(self, make, loader, folders):
        pool = make()
        await use(pool, "a", "b")
        assert await pool.refresh() == {}
        publish(folders["a"], pool.manifest("a"))
        publish(folders["c"], pool.manifest("c"))  # not loaded
        loader.loaded.clear()
        results = await pool.refresh()
        assert results == {"a": None} and loader.names == ["a"]

        def fail(folder: Path) -> None:
            raise BundleError("spoilt")

        loader.before = fail
        publish(folders["a"], pool.manifest("a"))
        assert isinstance((await pool.refresh())["a"], BundleError)
        await use(pool, "a")

    async def test_of_a_real_model_under_its_requests_changes_no_answer(self, tiny_bundle, tmp_path, monkeypatch):
        """The folder is replaced first, as a build does: nothing of the new one reaches those who have the old one."""
        folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
        messages = [{"role": "user", "content": "def"}]

        async def ask(pool: Pool) -> str:
            async with pool.lease("m") as model:
                return (await model.stream_chat(messages, max_tokens=12, temperature=0)).text

        pool = Pool({"m": folder}, memory=None, load_options={"threads": 1})
        expected = await ask(pool)
        shutil.copytree(tiny_bundle, tmp_path / "next")
        folder.rename(tmp_path / "former")
        (tmp_path / "next").rename(folder)
        asked = [asyncio.create_task(ask(pool)) for _ in range(4)]
        await asyncio.sleep(0)
        assert await pool.refresh() == {"m": None}
        asked += [asyncio.create_task(ask(pool)) for _ in range(4)]
        assert set(await asyncio.gather(*asked)) == {expected}
        await pool.close()
        assert pool.states()["m"].draining == 0


def add(folder: Path, *names: str) -> None:
    """Put adapters into a bundle, as the double of a model takes them."""
    for name in names:
        (folder / ADAPTERS_FOLDER / name).mkdir(parents=True)
        (folder / ADAPTERS_FOLDER / name / "adapter.json").touch()


def remove(folder: Path, name: str) -> None:
    shutil.rmtree(folder / ADAPTERS_FOLDER / name)


class TestAdapters:
    async def test_of_a_bundle_are_names_of_its_model_before_it_is_loaded(self, make, loader, folders):
        add(folders["b"], "law", "sql")

        pool = make("ab")
        assert pool.adapters == {"law": "b", "sql": "b"} and pool.names == ("a", "b")
        assert [pool.base(name) for name in ("sql", "a")] == ["b", "a"]
        assert pool.manifest("sql") is pool.manifest("b")
        await use(pool, "sql")
        assert loader.names == ["b"] and loader.loaded[0].adapters == {"law", "sql"}

    async def test_come_and_go_while_their_model_serves(self, make, loader, folders):
        pool = make("a")
        held = Held(pool, "a")
        model: Any = await held.model
        add(folders["a"], "sql")
        await pool.place("a").load_adapter("sql")
        assert model.adapters == {"sql"} and pool.adapters == {"sql": "a"}
        await pool.place("a").unload_adapter("sql")
        assert model.adapters == set() and pool.adapters == {}
        with pytest.raises(RequestError, match="there is no adapter 'sql'"):
            await pool.place("a").unload_adapter("sql")
        await held.end()
        assert loader.names == ["a"]

    async def test_that_are_asked_for_load_a_model_that_is_not(self, make, loader, folders):
        pool = make("a")
        add(folders["a"], "sql")
        await pool.place("a").load_adapter("sql")
        assert loader.loaded[0].adapters == {"sql"} and pool.adapters == {"sql": "a"}

    @pytest.mark.parametrize("name", ["../b", "..", "/etc", "none", ""])
    async def test_that_no_bundle_has_are_refused(self, make, loader, folders, name):
        add(folders["a"], "law")

        pool = make("ab")
        with pytest.raises(UsageError, check=about("adapter")):
            await pool.place("a").load_adapter(name)
        assert not loader.loaded

    async def test_that_are_damaged_change_nothing_and_name_no_folder(self, make, loader, folders):
        pool = make("a")
        await use(pool, "a")
        (folders["a"] / ADAPTERS_FOLDER / "sql").mkdir(parents=True)
        with pytest.raises(BundleError) as refused:
            await pool.place("a").load_adapter("sql")
        assert from_llmc(refused.value).message == "the model: the adapter sql could not be loaded: it is damaged"
        assert pool.adapters == {}
        await use(pool, "a")

    @pytest.mark.threat("adapter-rights")
    @pytest.mark.parametrize("name", ["b", "sql"])
    async def test_with_the_name_of_something_else_are_refused(self, make, folders, name):
        add(folders["b"], "sql")

        pool = make("ab")
        await use(pool, "a")
        add(folders["a"], name)
        for refused in (pool.place("a").load_adapter(name), pool.place("a").swap()):
            with pytest.raises(BundleError, match=f"a has an adapter '{name}', the name of another model"):
                await refused
        assert isinstance((await pool.refresh())["a"], BundleError)
        assert pool.adapters == {"sql": "b"}
        await use(pool, "a")
        with pytest.raises(BundleError, match="has an adapter"):
            make("ab")

    async def test_are_after_a_refresh_what_the_bundles_have(self, make, loader, folders):
        add(folders["a"], "law", "sql")
        add(folders["b"], "old")

        pool = make("ab")
        await use(pool, "a")
        assert await pool.refresh() == {}
        remove(folders["a"], "law")
        add(folders["a"], "new")
        remove(folders["b"], "old")
        assert await pool.refresh() == {"a": None, "b": None}
        assert pool.adapters == {"sql": "a", "new": "a"}
        assert loader.names == ["a"] and loader.loaded[0].adapters == {"sql", "new"}
        folders["a"].rename(folders["a"].with_name("gone"))
        assert await pool.refresh() == {} and pool.adapters == {"sql": "a", "new": "a"}

    async def test_of_another_bundle_come_with_it(self, make, loader, folders):
        add(folders["a"], "law")
        add(folders["b"], "sql")

        pool = make("a")
        await use(pool, "a")
        await pool.place("a").swap(folders["b"])
        assert pool.adapters == {"sql": "a"} and loader.loaded[1].adapters == {"sql"}


class TestEnd:
    async def test_waits_for_requests_and_refuses_new_ones(self, make, loader):
        pool = make("a")
        held = Held(pool, "a")
        model = await held.model
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.01)
        with pytest.raises(EngineClosedError, match="the service is stopping"):
            await use(pool, "a")
        assert not closing.done() and not model.closed.is_set()
        await held.end()
        await closing
        assert model.closed.is_set()

    async def test_without_drain_waits_for_nobody(self, make, loader):
        pool, go = make("ab"), threading.Event()
        held = Held(pool, "a")
        model = await held.model
        loader.before = lambda folder: go.wait(WAIT_S)
        late = asyncio.create_task(use(pool, "b"))
        await until(lambda: pool.states()["b"].phase == "loading")
        closing = asyncio.create_task(pool.close(drain=False))
        await until(model.closed.is_set)
        go.set()
        await closing
        with pytest.raises(EngineClosedError):
            await late
        assert all(model.closed.is_set() for model in loader.loaded) and pool.memory_taken == 0
        await held.end()

    async def test_a_lost_gpu_is_remembered(self, make):
        pool = make("a")
        with pytest.raises(GpuError):
            async with pool.lease("a"):
                raise GpuError("gone", lost=True)
        assert pool.lost is not None


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda pool: use(pool, "nobody"), UsageError),
        (lambda pool: pool.place("nobody").swap(), UsageError),
        (lambda pool: pool.place("a").swap(Path("/nowhere")), BundleError),
    ],
)
async def test_what_is_not_there_is_refused(call, error, make):
    pool = make()
    with pytest.raises(error):
        await call(pool)
    await use(pool, "a")


def test_no_bundle_at_all_is_refused():
    with pytest.raises(UsageError, check=about("models")):
        Pool({}, memory=None, load_options={})


@pytest.mark.parametrize(("name", "value"), [("max_context", 10**6), ("max_batch", 10**3)])
def test_what_no_bundle_was_built_for_is_refused_before_anything_is_loaded(tiny_bundle, name, value):
    with pytest.raises(UsageError, match=f"{name} is {value}, .* built for .* build with a larger --"):
        Pool({"tiny": tiny_bundle}, memory=None, load_options={name: value})
