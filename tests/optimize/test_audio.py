"""The plan of a model that hears, in the sizes of Qwen3-ASR 0.6B."""

from dataclasses import replace

from doubles.geometries import AUDIO, uniform

from llmc.bundle.model.linear import Linear
from llmc.optimize.plan.memory import memory_plan
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.runtime.audio.decode import LARGEST_FILE

DEAF = uniform("qwen3_asr", 1, 1024, 3072, 16, 8, 128, 151_936, 65_536, True, (0,))


def test_the_plan_counts_the_tower_and_audio_that_fills_the_context():
    linears = (*AUDIO.linears, Linear("audio.layers.0.mlp.up_proj", 3584, 896, True, "audio", "", 0))
    hearing = replace(DEAF, audio=replace(AUDIO, linears=linears))
    recipe, limits = resolve(Request(precision="fp32"), capabilities("cpu"), 1300, "test")
    deaf, found = (memory_plan(it, limits, recipe, 0) for it in (DEAF, hearing))
    weights, kernels = 4 * (896 * 7680 + 3584 * 896), 2 * 4 * 9 * (480 + 2 * 480**2)
    convolved = 4 * 4 * 8 * 480 * 64 * 50  # four arrays behind the first convolution, of a window of 8 chunks
    decoding = LARGEST_FILE + 2 * 4 * 100 * 100 * (160 + 128)  # 100 s
    assert deaf["tower"].fixed == 0
    assert found["tower"].fixed == weights + kernels + convolved + decoding + 11_000_000 + 64_000_000
    assert found["workspace"].per_length - deaf["workspace"].per_length == 4 * 1024
