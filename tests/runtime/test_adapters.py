"""Adapters beside a loaded model: what PEFT computes, each row its own, and what is refused."""

import json
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.adapters import draw_factors, write_adapter
from doubles.clocks import even_costs
from doubles.images import draw
from doubles.refusals import about
from doubles.towers import share_seeing

from llmc.bundle import ADAPTERS_FOLDER, FACTORS_FILE, read_bundle
from llmc.errors import BundleError, CheckpointError, LlmcError, RequestError, ResourceError, UsageError
from llmc.export import export
from llmc.export.adapters import add_adapter
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import Model, load
from llmc.runtime.api.options import Determinism
from llmc.runtime.sessions import Batch, Phase
from llmc.runtime.sessions.adapters import Adapters

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of PEFT
# Of log-probabilities in float32, whose sums are made in another order than transformers': 5e-6 here. Factors that are
# off by 1 % move some by more than ten times as much.
TOLERANCE = 1e-4
# Mean KL from PEFT in float32, in nats, of tokens of a prompt by weights of 8 bits: 0.0005 here, and 1 without the
# adapter.
MOST_KL = 0.002
PROMPT = [7 * i % 400 + 10 for i in range(70)]
Q = "model.layers.0.self_attn.q_proj"
NAMES = ("sql", "law")


@pytest.fixture(scope="module")
def bundles(adapter_bundles: Path) -> Path:
    return adapter_bundles


@pytest.fixture(scope="module")
def model(bundles: Path) -> Iterator[Model]:
    with load(bundles / "fp32", self_test=False) as found:
        yield found


@pytest.fixture
def own(bundles: Path) -> Iterator[Model]:
    """A model whose adapters a test may unload."""
    with load(bundles / "fp32", self_test=False) as found:
        yield found


def place(bundles: Path, name: str) -> Path:
    return bundles / "fp32" / ADAPTERS_FOLDER / name


def submit(model: Model, adapter: str | None, prompt: list[int] = PROMPT, **params: Any) -> Any:
    chosen = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 1, **params}
    return model.stream(prompt, adapter=adapter, **chosen)


def tokens(result: Any) -> tuple[int, ...]:
    return tuple(result.token_ids)


def logprobs(result: Any) -> list[float]:
    return [it.logprob for it in (*(result.prompt_logprobs or ()), *result.outputs[0].logprobs)]


class Peft:
    """Log-probabilities as PEFT computes them on transformers, in float32."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        peft = pytest.importorskip("peft")
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
        self.model = peft.PeftModel.from_pretrained(base, folder).eval()

    def __call__(self, ids: list[int]) -> Any:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


@pytest.fixture(scope="module")
def peft(tiny_checkpoint: Path, bundles: Path) -> dict[str, Peft]:
    return {name: Peft(tiny_checkpoint, bundles / name) for name in NAMES}


def test_rows_with_adapters_are_as_peft_computes_them_alone_and_in_a_mixed_batch(model, peft):
    plain = logprobs(submit(model, None, prompt_logprobs=0).result())
    alone = {name: submit(model, name, prompt_logprobs=0).result() for name in NAMES}
    mixed = {name: submit(model, name, prompt_logprobs=0) for name in (*NAMES, None)}
    for name in NAMES:
        ids = [*PROMPT, *tokens(alone[name])]
        every = peft[name](ids)
        wanted = np.array([every[i, token] for i, token in enumerate(ids[1:])])
        assert np.abs(logprobs(alone[name]) - wanted).max() <= TOLERANCE
        assert np.abs(logprobs(mixed[name].result()) - wanted).max() <= TOLERANCE
        assert np.abs(np.array(plain[: len(PROMPT) - 1]) - wanted[: len(PROMPT) - 1]).max() > 1  # it does something
    np.testing.assert_allclose(logprobs(mixed[None].result()), plain, atol=TOLERANCE)


def test_a_scale_that_is_off_by_one_percent_is_seen(bundles, model, peft, tmp_path):
    wrong = write_adapter(tmp_path / "sql", draw_factors(model.manifest.geometry), lora_alpha=16.16)
    copied = shutil.copytree(bundles / "fp32", tmp_path / "bundle", ignore=lambda *_: [ADAPTERS_FOLDER])
    add_adapter(copied, wrong, "sql")
    with load(copied, self_test=False) as found:
        result = submit(found, "sql", prompt_logprobs=0).result()
    every = peft["sql"](PROMPT)
    wanted = np.array([every[i, token] for i, token in enumerate(PROMPT[1:])])
    assert np.abs(logprobs(result)[: len(wanted)] - wanted).max() > 10 * TOLERANCE


def test_quantized_weights_keep_what_the_adapter_says(bundles, peft):
    wanted = peft["sql"](PROMPT)
    ids, start, every = np.array([PROMPT]), np.zeros(1, np.int64), np.arange(len(PROMPT))[None]
    with load(bundles / "int8", self_test=False) as found:
        session, adapter = found.runner.session, found.engine.adapters.find("sql")
        session.cache.grow(1, len(PROMPT), found.max_context)

        def kl(adapters: Any) -> float:
            call = replace(Batch.of(Phase.DECODE, ids, start, every), adapters=adapters)
            logits = session.run(call)[0].astype(np.float64)
            seen = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            return float((np.exp(wanted) * (wanted - seen)).sum(-1).mean())

        assert kl((adapter,)) <= MOST_KL < 100 * MOST_KL < kl(())


@pytest.mark.parametrize("level", ["batch", "strict"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])  # in int8 the graph of adapters has weights of its own
def test_alone_and_together_give_the_same_bits(bundles, precision, level):
    how = {"self_test": False, "determinism": level, "threads": 2}  # whose work is divided
    with load(bundles / precision, prefix_cache_bytes=0, **how) as found:
        alone = {name: logprobs(submit(found, name, max_tokens=40).result()) for name in (None, *NAMES)}
        together = {name: submit(found, name, max_tokens=40) for name in (None, *NAMES)}
        assert {name: logprobs(it.result()) for name, it in together.items()} == alone
        found.unload_adapter("sql")  # of the larger rank
    law = {"law": place(bundles, "law")}
    with load(bundles / precision, adapters=law, **how) as found:
        assert logprobs(submit(found, "law", max_tokens=40).result()) == alone["law"]


def test_a_model_that_sees_says_with_an_adapter_what_the_merged_one_says(one_trace, tmp_path, tmp_path_factory):
    shared = share_seeing(tmp_path_factory, "qwen3_vl")
    parts = [{"type": "image", "image": draw("RGB", 75, 26)}, {"type": "text", "text": "def f(x):"}]
    talks = [[{"role": "user", "content": content}] for content in (parts, parts[1:])]
    chosen = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
    built = build(BuildRequest(shared / "export", tmp_path / "live", precision="fp32", adapters=1, rank=8))
    factors = draw_factors(built.manifest.geometry, deviation=0.3)
    renamed = {name.replace("model.layers", "model.language_model.layers"): it for name, it in factors.items()}
    folder = write_adapter(tmp_path / "sql", renamed)  # by the names that PEFT has for its text part
    add_adapter(built.output, folder, "sql")
    merged = export(shared / "checkpoint", tmp_path / "both", adapters=[(folder, 1.0)]).output
    with load(build(BuildRequest(merged, tmp_path / "merged", precision="fp32")).output, self_test=False) as found:
        wanted = [tokens(found.chat(talk, **chosen).outputs[0]) for talk in talks]
    with load(built.output, self_test=False) as found:
        asked = [
            (found.stream_chat(talk, adapter="sql", **chosen), found.stream_chat(talk, **chosen)) for talk in talks
        ]
        for (live, plain), expected in zip(asked, wanted, strict=True):
            assert tokens(live.result().outputs[0]) == expected != tokens(plain.result().outputs[0])


def test_a_level_that_the_build_did_not_see_kept_is_refused(bundles, tmp_path):
    folder = shutil.copytree(bundles / "fp32", tmp_path / "bundle", ignore=lambda *_: [ADAPTERS_FOLDER])
    content = json.loads((folder / "llmc.json").read_text(encoding="utf-8"))
    content["adapter_graph"]["invariance"]["tokens"] = 0
    (folder / "llmc.json").write_text(json.dumps(content), encoding="utf-8")
    with load(folder, self_test=False, determinism=Determinism.BATCH) as found:
        with pytest.raises(UsageError, match="which calls with adapters did not keep in the build"):
            found.load_adapter("sql", place(bundles, "sql"))
        assert tokens(submit(found, None).result())


def test_samples_beams_and_drafts_work_with_an_adapter(bundles, model, monkeypatch):
    wanted = tokens(submit(model, "sql", max_tokens=24).result())
    assert tokens(submit(model, "sql", max_tokens=24, num_beams=1, n=1).result()) == wanted
    beams = submit(model, "sql", num_beams=3, num_return_sequences=3, logprobs=None).result()
    assert len({it.token_ids for it in beams.outputs}) == 3
    assert beams.outputs[0].token_ids != submit(model, None, num_beams=3, logprobs=None).result().outputs[0].token_ids
    drawn = submit(model, "sql", n=2, temperature=1.0, seed=3).result()
    again = submit(model, "sql", n=2, temperature=1.0, seed=3).result()
    assert [it.token_ids for it in drawn.outputs] == [it.token_ids for it in again.outputs]
    even_costs(monkeypatch)
    with load(bundles / "fp32", self_test=False, draft="lookup") as drafting:
        result = submit(drafting, "sql", max_tokens=24).result()
        assert tokens(result) == wanted
        assert result.metrics.drafted > 0


def test_a_prefix_is_of_its_adapter_alone(own):
    first, *others = (submit(own, name).result().usage.cached_tokens for name in ("sql", "law", None, "sql"))
    assert (first, others) == (0, [0, 0, 64])


def test_an_adapter_that_is_unloaded_serves_who_has_it_and_gives_its_place_free_after_the_last(own, bundles):
    going, seen = threading.Event(), threading.Event()

    def wait(delta: Any) -> None:
        seen.set()
        assert going.wait(60)

    wanted = tokens(submit(own, "sql").result())
    running = submit(own, "sql", on_delta=wait)
    assert seen.wait(60)
    own.unload_adapter("sql")
    with pytest.raises(RequestError, match="there is no adapter 'sql'; loaded are law: load it first"):
        submit(own, "sql")
    with pytest.raises(ResourceError, match="2 adapters are loaded or still used by requests"):
        own.load_adapter("more", place(bundles, "sql"))
    going.set()
    assert tokens(running.result()) == wanted
    own.engine.call(lambda: None)  # the step that ended it is over
    assert own.load_adapter("more", place(bundles, "sql")).rank == 8
    assert tokens(submit(own, "more").result()) == wanted
    assert own.adapters.keys() == {"law", "more"}


def test_an_adapter_is_loaded_while_others_stream_and_joins_their_batch(bundles, model):
    going, seen = threading.Event(), threading.Event()
    wanted = {name: tokens(submit(model, name, max_tokens=16).result()) for name in ("sql", None)}

    def wait(delta: Any) -> None:
        seen.set()
        assert going.wait(60)

    with load(bundles / "fp32", adapters={}, self_test=False) as found:
        streaming = submit(found, None, max_tokens=16, on_delta=wait)
        assert seen.wait(60)
        found.load_adapter("sql", place(bundles, "sql"))
        joining = submit(found, "sql", max_tokens=16)
        going.set()
        assert tokens(streaming.result()) == wanted[None]
        assert tokens(joining.result()) == wanted["sql"]


@pytest.mark.threat("adapter-files")
def test_a_name_that_is_taken_or_none_is_refused(own, bundles):
    with pytest.raises(UsageError, check=about("name")):
        own.load_adapter("sql", place(bundles, "sql"))
    with pytest.raises(UsageError, check=about("name")):
        own.load_adapter("../x", place(bundles, "sql"))
    with pytest.raises(RequestError, match="there is no adapter 'x'"):
        own.unload_adapter("x")


def test_a_bundle_without_room_takes_no_adapter(tiny_bundle, bundles):
    with load(tiny_bundle, self_test=False) as found, pytest.raises(BundleError, match="has no room for adapters"):
        found.load_adapter("sql", place(bundles, "sql"))
    with pytest.raises(UsageError, match="has 0 adapters, and was built for 0"):
        add_adapter(tiny_bundle, bundles / "sql", "sql")


def change(folder: Path, what: str) -> None:
    """Damage a folder that llmc adapter add wrote."""
    path, values = folder / "adapter.json", np.load(folder / FACTORS_FILE)
    content = json.loads(path.read_text(encoding="utf-8"))
    match what:
        case "byte":
            values[100] += 1
            np.save(folder / FACTORS_FILE, values)
            return
        case "nan":
            values[100] = np.nan
        case "short":
            values = values[:-8]
        case "rank":
            content["rank"] = 16
        case "base":
            content["base"] = "0" * 64
        case "module":
            content["modules"][0] = "model.layers.0.nothing"
    from llmc.bundle import sha256_file

    np.save(folder / FACTORS_FILE, values)
    content["sha256"] = sha256_file(folder / FACTORS_FILE)
    path.write_text(json.dumps(content), encoding="utf-8")


DAMAGED = {
    "byte": "factors.npy or the version of adapter.json changed",
    "nan": "holds NaN or infinite values",
    "short": "does not fit 42 linears",
    "rank": "has rank 16, and the bundle was built for 8",
    "base": "was added for another base than this bundle's",
    "module": "the bundle has no linear 'model.layers.0.nothing'",
}


@pytest.mark.threat("adapter-files")
@pytest.mark.parametrize("what", DAMAGED)
def test_a_folder_that_does_not_fit_is_refused_and_others_go_on(what, model, bundles, tmp_path):
    folder = shutil.copytree(place(bundles, "sql"), tmp_path / "sql")
    change(folder, what)
    with load(bundles / "fp32", adapters={}, self_test=False) as found:
        running = submit(found, None)
        with pytest.raises(LlmcError, match=DAMAGED[what]):
            found.load_adapter("sql", folder)
        assert found.adapters == {}
        assert tokens(running.result()) == tokens(submit(model, None).result())


@pytest.mark.threat("adapter-files")
@pytest.mark.parametrize("file", [FACTORS_FILE, "adapter.json"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device", "link to a device", "link out", "nothing"])
def test_what_is_no_file_of_the_folder_is_refused_at_once(kind, file, bundles, tmp_path):
    folder = shutil.copytree(place(bundles, "sql"), tmp_path / "sql")
    path = (folder / file).rename(tmp_path / "outside").parent / "sql" / file
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
        case "folder":
            path.mkdir()
        case "device":
            try:
                os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which never ends
            except PermissionError:
                pytest.skip("only root makes devices")
        case "link to a device":
            path.symlink_to("/dev/zero")
        case "link out":
            path.symlink_to(tmp_path / "outside")
    found = Adapters(read_bundle(bundles / "fp32"), lambda: None)
    with pytest.raises(BundleError, match=r"not a regular file|leads out|Is a directory|No such file|No such device"):
        found.load("sql", folder)
    assert found.loaded == {}


@pytest.mark.threat("adapter-files")
def test_an_adapter_whose_file_is_cut_short_meanwhile_goes_on(bundles, model, tmp_path):
    folder = shutil.copytree(place(bundles, "sql"), tmp_path / "sql")
    with load(bundles / "fp32", adapters={"sql": folder}, self_test=False) as found:
        os.truncate(folder / FACTORS_FILE, 100)
        assert tokens(submit(found, "sql").result()) == tokens(submit(model, "sql").result())


def pair(module: str = Q, outputs: int = 256, inputs: int = 256, rank: int = 8) -> dict[str, Any]:
    names = (f"base_model.model.{module}.lora_{part}.weight" for part in "AB")
    return dict(zip(names, (np.ones((rank, inputs), np.float32), np.ones((outputs, rank), np.float32)), strict=True))


REFUSED = {
    "a larger rank": (pair(rank=12), {"r": 12}, "has rank 12, and the bundle was built for 8"),
    "another base": (pair(inputs=128), {}, r"q_proj as \[256, 128\], but the bundle has \[256, 256\]"),
    "no such module": (pair("model.layers.9.mlp.up_proj"), {}, "layers.9.mlp.up_proj, and beside a model only"),
    "a head": (pair("lm_head", 4096), {}, "lm_head, and beside a model only its layers' linears are changed"),
    "an expert": (pair("model.layers.0.mlp.experts.1.up_proj"), {}, "experts.1.up_proj, and beside a model only"),
    "no number": (pair() | {f"x.{Q}.lora_B.weight": np.full((256, 8), np.nan, np.float32)}, {}, "holds NaN"),
    "a whole tensor": (pair() | {"lm_head.weight": np.ones((4, 4), np.float32)}, {}, "it replaces lm_head.weight"),
    "beyond float32": (pair(), {"lora_alpha": 1e39}, "lora_alpha=1e\\+39 is unsupported"),
    "dora": (
        pair() | {f"base_model.model.{Q}.lora_magnitude_vector": np.ones(256, np.float32)},
        {"use_dora": True},
        "q_proj with DoRA, and beside a model only",
    ),
}


@pytest.mark.threat("adapter-files")
@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_cannot_be_live_is_refused_by_name_and_nothing_is_written(name, bundles, tmp_path):
    found, config, message = REFUSED[name]
    folder = write_adapter(tmp_path / "adapter", found, **config)
    target = shutil.copytree(bundles / "fp32", tmp_path / "bundle", ignore=lambda *_: [ADAPTERS_FOLDER])
    with pytest.raises(CheckpointError, match=message):
        add_adapter(target, folder, "sql")
    assert not (target / ADAPTERS_FOLDER).exists()


def test_room_is_refused_where_no_graph_could_use_it(tiny_export, tmp_path):
    for changes, message in (
        ({"rank": 8}, "rank is 8, and there is no room for adapters"),
        ({"adapters": 1, "rank": 1000}, "rank is 1000, expected 1 ... 512"),
    ):
        with pytest.raises(UsageError, match=message):
            build(BuildRequest(tiny_export, tmp_path / "bundle", **changes))


def test_the_memory_plan_counts_the_graph_every_adapter_and_every_row(bundles, fp32_bundle):
    manifest, without = read_bundle(bundles / "fp32"), read_bundle(fp32_bundle)
    opened = [it for it in manifest.geometry.linears if it.is_open]
    factors = 4 * 8 * sum(it.inputs + it.outputs for it in opened)
    more = manifest.memory.total(64, 3) - without.memory.total(64, 3)
    assert manifest.memory.parts(64, 3)["adapters"] == more
    assert more >= 5 * factors + sum(4 * it.size for it in manifest.geometry.linears)
