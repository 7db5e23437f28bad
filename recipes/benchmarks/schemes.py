"""Cost of each quantization scheme in quality: build the small model with it, and judge both paths of the bundle.

    python schemes.py [NAME ...] [--windows 16]

Calibrated on 64 windows of 256 tokens of recipes/tiny/calibration.txt, judged on windows of 256 tokens of
recipes/tiny/validation.txt. About 20 seconds each on two cores; what was calibrated once comes from llmc's cache.
"""

import argparse
import tempfile
from pathlib import Path

from llmc.cli import output as show
from llmc.export import export
from llmc.export.streaming import StreamedDecoder
from llmc.optimize.build import build
from llmc.optimize.calibrate.request import CalibrationRequest
from llmc.optimize.judge.evaluate import evaluate, read_windows
from llmc.optimize.recipe import Request, needs_calibration, resolve
from llmc.optimize.targets import capabilities
from llmc.runtime import load

TINY = Path(__file__).resolve().parents[1] / "tiny"
SAMPLES, LENGTH = 64, 256
MIXED = {"*.mlp.down_proj": "int8", "*.self_attn.v_proj": "int8"}
SCHEMES = {
    "int4 rtn": Request(precision="int4", scheme="rtn"),
    "int4 awq": Request(precision="int4", scheme="awq"),
    "int4 gptq": Request(precision="int4", scheme="gptq"),
    "int4 awq+gptq": Request(precision="int4", scheme="awq+gptq"),
    "int4 gptq, zero points": Request(precision="int4", scheme="gptq", symmetric=False),
    "int4 gptq, blocks of 32": Request(precision="int4", scheme="gptq", block_size=32),
    "int4 rtn, head int8": Request(precision="int4", scheme="rtn", head="int8"),
    "int4 awq, head int8": Request(precision="int4", scheme="awq", head="int8"),
    "int4 gptq, head int8": Request(precision="int4", scheme="gptq", head="int8"),
    "int4 gptq; head, v, down int8": Request(precision="int4", scheme="gptq", head="int8", layers=MIXED),
    "int8 rtn": Request(precision="int8", scheme="rtn"),
    "int8 gptq": Request(precision="int8", scheme="gptq"),
    "int8 rtn, smoothed 0.5": Request(precision="int8", scheme="rtn", smoothing=0.5),
    "int8 static": Request(precision="int8", scheme="rtn", activations="static"),
    "int8 static, smoothed 0.75": Request(precision="int8", scheme="rtn", activations="static", smoothing=0.75),
    "int8 rtn, int8 cache": Request(precision="int8", scheme="rtn", cache="int8"),
    "int8 rtn, int8-channel cache": Request(precision="int8", scheme="rtn", cache="int8-channel"),
    "int8 2:4 magnitude": Request(precision="int8", scheme="rtn", sparsity="magnitude"),
    "int8 2:4 wanda": Request(precision="int8", scheme="rtn", sparsity="wanda"),
    "int8 2:4 wanda, gptq": Request(precision="int8", scheme="gptq", sparsity="wanda"),
}


def row(name: str, source: Path, folder: Path, windows: int) -> tuple[str, ...]:
    """Build one bundle and judge it."""
    request = SCHEMES[name]
    recipe, _ = resolve(request, capabilities("cpu"), 2048, name)
    asked = CalibrationRequest(StreamedDecoder, TINY / "calibration.txt", SAMPLES, LENGTH)
    calibration = asked if needs_calibration(recipe) else None
    build(source, folder, recipe=request, calibration=calibration, force=True)
    with load(folder, self_test=False) as model:
        found = evaluate(
            model, read_windows(TINY / "validation.txt", model, LENGTH, windows), reference=source, greedy=False
        ).quality
    prefill, decode = found.phases["prefill"], found.phases["decode"]
    increase = decode.perplexity / (found.reference_perplexity or 1) - 1
    kl = (f"{value:.5f}" for value in (prefill.mean_kl, decode.mean_kl, decode.p99_kl))
    return name, *kl, f"{decode.top1_agreement:.1%}", f"{increase:+.2%}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*SCHEMES, []], default=[], metavar="NAME")
    parser.add_argument("--windows", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = export(TINY / "checkpoint", Path(temporary) / "export").output
        rows = [row(name, source, Path(temporary) / "bundle", arguments.windows) for name in arguments.names or SCHEMES]
    columns = ("scheme", "prefill mean KL", "decode mean KL", "decode p99", "same choice", "perplexity")
    show.print_table(columns, rows, numbers=True)


if __name__ == "__main__":
    main()
