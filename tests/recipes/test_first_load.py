"""The benchmark of first loads: what it drops, reads and divides, and one whole run on the small model."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="drops files as Linux does")


def test_all_files_of_a_model_are_written_and_dropped(script, monkeypatch, tmp_path: Path):
    module = script("first_load")
    (tmp_path / "below").mkdir()
    files = [tmp_path / "a.bin", tmp_path / "below" / "b.bin"]
    for path in files:
        path.write_bytes(b"x" * 10)
    assert module.files_of(tmp_path) == files
    assert module.files_of(files[0]) == files[:1]
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("written", os.readlink(f"/proc/self/fd/{fd}"))))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *rest: calls.append((os.fstat(fd).st_size, *rest)))
    module.drop(files[:1])
    assert calls == [("written", str(files[0].resolve())), (10, 0, 0, os.POSIX_FADV_DONTNEED)]


def test_the_rate_of_the_disk_is_that_of_all_bytes(script, monkeypatch, tmp_path: Path):
    module, clock = script("first_load"), iter((100.0, 102.0))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    for name, size in (("a", 3_000_000), ("b", 1_000_000)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert module.read_rate([tmp_path / "a", tmp_path / "b"]) == 2.0


def row(script: Any, name: str, *rounds: tuple[float, float]) -> Any:
    peers = script("peers")
    found = [
        {"cold": {"seconds": cold, "cpu_s": 1.0, "read_mb": 5}, "again": {"seconds": again}, "disk_mb_s": 300}
        for cold, again in rounds
    ]
    return peers.Row(peers.Entry(name, "4 bits", "llmc", "model"), "", found)


def test_ratios_are_ours_over_theirs_within_each_round(script):
    ours = row(script, "llmc", (2.0, 1.0), (4.0, 1.0), (9.0, 1.0))
    peer = row(script, "peer", (1.0, 2.0), (1.0, 4.0), (3.0, 5.0))
    broken = row(script, "broken")
    broken.trouble = "runners.py failed"
    assert list(script("first_load").lines([ours, peer, broken])) == [
        ("llmc", "4.00", "1.00", "1.0", "5", "300"),
        ("peer", "1.00 (3.00x; 2.00 to 4.00)", "4.00 (0.25x; 0.20 to 0.50)", "1.0", "5", "300"),
        ("broken", *["runners.py failed"] * 5),
    ]
    assert list(script("first_load").lines([broken, peer]))[1] == ("peer", "1.00", "4.00", "1.0", "5", "300")


def test_each_round_opens_the_model_first_as_never_seen_and_then_again(
    script, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    module = script("first_load")
    systems, out = tmp_path / "systems.toml", tmp_path / "out.json"
    systems.write_text(
        f'[[system]]\nname = "ours"\ngroup = "g"\nrunner = "llmc"\nmodel = "{tiny_bundle}"\n'
        '[[system]]\nname = "other"\ngroup = "g"\nrunner = "openvino"\nmodel = "none"\n'
    )
    caches: list[tuple[str, list[str]]] = []
    run = module.run_script

    def watched(*arguments: object, environment: dict[str, str], **rest: Any) -> str:
        caches.append((environment["LLMC_CACHE"], sorted(os.listdir(environment["LLMC_CACHE"]))))
        return run(*arguments, environment=environment, **rest)

    monkeypatch.setattr(module, "run_script", watched)
    monkeypatch.setattr(sys, "argv", ["x", str(systems), "--rounds", "1", "--prompt", "4", "--output", str(out)])
    assert module.main() == 0
    ours, other = json.loads(out.read_text())["rows"]
    (found,) = ours["rounds"]
    for state in ("cold", "again"):
        assert 0 < found[state]["open_s"] <= found[state]["seconds"]
    assert found["disk_mb_s"] >= 0
    assert other["trouble"].startswith("not run")
    (first, nothing), (second, kept) = caches
    assert first == second and nothing == []
    assert {"integrity", "selftest", "tokenizer"} <= set(kept)
