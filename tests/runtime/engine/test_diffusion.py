"""Requests to a diffusion model: alone or together, ended by texts and tokens, stopped, refused."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from doubles.refusals import about

from llmc.errors import CancelledError, DeadlineError, UsageError
from llmc.runtime import Model, load
from llmc.runtime.bench.benchmark import benchmark
from llmc.runtime.loading import memory_need
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.models.loading import Loader

OPTIONS = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
SLOW = {"max_tokens": 100, "ignore_eos": True, "diffusion_steps": 100}


@pytest.fixture(scope="module")
def model(diffusion_models: Path) -> Iterator[Model]:
    with load(diffusion_models / "llada-fp32", threads=1) as loaded:
        yield loaded


def test_requests_together_get_what_they_get_alone(model):
    prompts = [[10 + i] * (5 + 7 * i) for i in range(5)]
    lengths = [{**OPTIONS, "max_tokens": 8 * (i + 1)} for i in range(5)]  # so that rows move when others end
    alone = [model.generate(prompt, **asked).token_ids for prompt, asked in zip(prompts, lengths, strict=True)]
    handles = [model.stream(prompt, **asked) for prompt, asked in zip(prompts, lengths, strict=True)]
    assert [handle.result().token_ids for handle in handles] == alone


def test_windows_of_one_length_share_calls_at_fast_and_at_no_other_level(model, diffusion_models):
    prompts, asked = [[10 + i] * (5 + 3 * i) for i in range(4)], {**OPTIONS, "max_tokens": 48, "block_length": 16}
    alone = [model.generate(prompt, **asked).token_ids for prompt in prompts]
    for level, most in (("fast", 4), ("batch", 1)):
        rows = []
        with load(diffusion_models / "llada-fp32", threads=1, self_test=False, determinism=level) as other:
            session = other.runner.session
            run = session.run
            session.run = lambda call, run=run, rows=rows: rows.append(len(call.input_ids)) or run(call)
            handles = other.engine.call(lambda: [other.stream(prompt, **asked) for prompt in prompts])
            assert [handle.result().token_ids for handle in handles] == alone
        assert max(rows) == most


def test_prefixes_are_refused_by_load_and_named_by_a_service(diffusion_models, tmp_path, caplog):
    folder = diffusion_models / "llada-fp32"
    with pytest.raises(UsageError, check=about("prefix_cache_folder")):
        load(folder, self_test=False, prefix_cache_folder=tmp_path)
    options = {"prefix_cache_folder": tmp_path, "prefix_cache_bytes": None, "threads": 1, "self_test": False}
    options |= ServerConfig().load_options
    with closing(Loader(options).load(folder, None, {})) as served:
        assert served.engine.prefixes is None
    assert "cannot use prefix_cache_folder, and is loaded without" in caplog.text  # the service's defaults go unnamed
    need = memory_need(served.manifest, {"prefix_cache_bytes": 1 << 40})
    assert need == memory_need(served.manifest, {"prefix_cache_bytes": 0})


def test_tokens_come_by_blocks_and_end_with_a_text_or_a_token(model):
    whole = model.generate([5, 6, 7], **OPTIONS)
    deltas = []
    model.generate([5, 6, 7], **OPTIONS, on_delta=deltas.append)
    assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    stopped = model.generate([5, 6, 7], **OPTIONS, stop=[whole.text[20:24]])
    assert stopped.finish_reason == "stop" and whole.text.startswith(stopped.text)
    assert stopped.text == whole.text[: whole.text.index(whole.text[20:24])]
    end = whole.token_ids[40]
    ended = model.generate([5, 6, 7], **OPTIONS, stop_token_ids=[end])
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]


def test_a_seed_repeats_what_it_drew(model):
    asked = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    one, two = (model.generate([9, 8], **asked, seed=3).token_ids for _ in range(2))
    assert one == two != model.generate([9, 8], **asked, seed=4).token_ids


def test_cancel_and_deadline_work_between_steps(model):
    handle = model.stream([5], **SLOW)
    handle.cancel()
    with pytest.raises(CancelledError):
        handle.result()
    with pytest.raises(DeadlineError):
        model.generate([5], **SLOW, deadline_s=0.05)
    assert len(model.generate([5], **OPTIONS).token_ids) == OPTIONS["max_tokens"]


def test_what_needs_tokens_in_their_order_is_refused_by_name(model):
    asked = {"json_schema": {"type": "object"}, "regex": "a*", "logprobs": 1, "n": 2, "num_beams": 2, "top_p": 0.5}
    asked |= {"repetition_penalty": 1.1, "on_overflow": "sink", "logits_processors": [lambda tokens, logits: logits]}
    for name, value in asked.items():
        with pytest.raises(UsageError, check=about(name)):
            model.generate([5], max_tokens=8, temperature=1.0, **{name: value})


def test_tools_are_refused_by_name_and_its_parameters_elsewhere(model, fp32_bundle):
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    with pytest.raises(UsageError, check=about("tools")):
        model.chat([{"role": "user", "content": "call f"}], tools=[tool], tool_format="hermes", max_tokens=8)
    with load(fp32_bundle, threads=1, self_test=False) as other:
        with pytest.raises(UsageError, check=about("block_length")):
            other.generate([5], max_tokens=8, block_length=8)


def test_it_neither_drafts_nor_is_timed_token_by_token(fp32_bundle, diffusion_models):
    with pytest.raises(UsageError, check=about("draft")):
        load(fp32_bundle, threads=1, self_test=False, draft=diffusion_models / "llada-fp32")
    with pytest.raises(UsageError, check=about("bundle")):
        benchmark(diffusion_models / "llada-fp32")


def test_levels_of_determinism_hold_and_drafts_are_refused(model, diffusion_models):
    wanted = model.generate([10] * 20, **OPTIONS).token_ids
    for level in ("strict", "batch"):
        with load(diffusion_models / "llada-fp32", threads=1, self_test=False, determinism=level) as other:
            assert other.generate([10] * 20, **OPTIONS).token_ids == wanted
    with load(diffusion_models / "llada-fp32", self_test=False, draft="auto") as other:
        assert other.generate([10] * 20, **OPTIONS).token_ids == wanted
    with pytest.raises(UsageError, check=about("draft")):
        load(diffusion_models / "llada-fp32", self_test=False, draft="lookup")
