"""Python ends while requests run: in time, with the application's own exit status, and not before its last thread."""

import subprocess
import sys
import time

import pytest

PATIENCE = 120.0
_PROMPT = "PROMPT = 'def area(width, height):' * 20\n"

# Everything that has threads: two engines, comparing, a draft model and the disk's.
_MANY = (
    _PROMPT
    + """
import sys
from llmc.runtime import load
bundle, folder, how = sys.argv[1:]
settings = dict(max_tokens=100_000, on_overflow="sink", temperature=0, ignore_eos=True)
models = [
    load(bundle, self_test=False, prefix_cache_folder=folder),
    load(bundle, self_test=False, draft=bundle),
]
models[0].generate(PROMPT, max_tokens=2, n=2, temperature=1.0, consensus="f1")
streams = [model.stream(PROMPT, **settings) for model in models for _ in range(2)]
for stream in streams:
    next(stream)
if how == "raise":
    raise ValueError("of the application")
if how == "exit":
    sys.exit(3)
"""
)

_WORKER = (
    _PROMPT
    + """
import sys, threading
from llmc.runtime import load
model = load(sys.argv[1], self_test=False)

def work():
    main = threading.main_thread()
    main.join()
    handles = [model.stream(PROMPT, max_tokens=9, temperature=0, ignore_eos=True) for _ in range(2)]
    print(main.is_alive(), [len(handle.result().token_ids) for handle in handles])
    print(len(model.generate("a", max_tokens=2, n=2, temperature=1.0, consensus="f1").outputs))

threading.Thread(target=work).start()
"""
)

_STUCK = """
import sys, threading
from llmc.runtime import load
from llmc.runtime.host import threads
threads.EXIT_S = 0.2
model = load(sys.argv[1], self_test=False)
inside = threading.Event()

def criterion(tokens, text):
    inside.set()
    threading.Event().wait()

handle = model.stream("a", stopping_criteria=[criterion])
inside.wait()
print(threads.time.monotonic(), flush=True)
"""


def ended(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.threat("process-exit")
@pytest.mark.parametrize(("how", "status"), [("exit", 3), ("raise", 1)])
def test_leaving_while_requests_run_has_the_status_of_the_application(tiny_bundle, tmp_path, how, status):
    process = ended(_MANY, tiny_bundle, tmp_path / "prefixes", how)
    assert process.returncode == status, process.stderr
    assert ("ValueError: of the application" in process.stderr) == (how == "raise")
    written = {path.suffix for path in (tmp_path / "prefixes").rglob("*") if path.is_file()}
    assert written == {".kv"}  # nothing half-written


def test_the_applications_threads_may_use_a_model_after_the_main_one(tiny_bundle):
    process = ended(_WORKER, tiny_bundle)
    assert (process.returncode, process.stdout) == (0, "False [9, 9]\n2\n"), process.stderr


@pytest.mark.threat("process-exit")
def test_a_function_that_never_returns_holds_up_the_end_for_a_bounded_time(tiny_bundle):
    process = ended(_STUCK, tiny_bundle)
    assert process.returncode == 0
    assert "llmc-engine did not end within 0.2 s" in process.stderr
    assert time.monotonic() - float(process.stdout) < PATIENCE / 4
