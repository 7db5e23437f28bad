"""The builder's calls against the recorded interface of TensorRT 10.16, which cannot be installed here.

The recorded library raises at every name and argument that it does not have, so a build that ends has proven its calls;
what they compute, only a GPU can tell.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from doubles.engines import build_decoder
from doubles.recorded import NO_KERNEL, PLAN, RecordedLibrary

from llmc.errors import BuildError, GpuError, ResourceError
from llmc.optimize.tensorrt.messages import remarks


def test_it_takes_our_calls(decoder, config):
    library = RecordedLibrary()
    report = build_decoder(library, decoder, config)
    assert decoder.with_name("engine.plan").read_bytes() == PLAN
    assert report.aliases["present.0.key"] == "past_key_values.0.key"
    assert (report.attention, library.arguments("IAttention", "decomposable=")) == ("fused", [(False,)])
    strongly_typed = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert library.arguments("Builder", "create_network") == [(strongly_typed,)]
    assert library.arguments("IBuilderConfig", "clear_flag") == [(library.BuilderFlag.TF32,)]


def test_attention_without_a_kernel_is_decomposed_and_the_report_says_so(decoder, config):
    library = RecordedLibrary(fuses=False)
    report = build_decoder(library, decoder, config)
    assert decoder.with_name("engine.plan").read_bytes() == PLAN
    assert (report.attention, library.arguments("IAttention", "decomposable=")) == ("decomposed", [(False,), (True,)])
    assert [(message.severity, message.text) for message in report.messages] == [("INFO", NO_KERNEL)]
    assert remarks(report.messages) == ()


@pytest.mark.parametrize("text", ["no kernel for n.mixed", "cannot compile for sm75: datatypes: b16"])
def test_no_other_failure_lets_attention_be_decomposed(text, decoder, config):
    library = RecordedLibrary(builds=False, log=(("ERROR", text),))
    with pytest.raises(BuildError, match=text):
        build_decoder(library, decoder, config)
    assert library.arguments("IAttention", "decomposable=") == [(False,)]


def test_every_option_is_one_that_it_has(decoder, config):
    asked = replace(
        config,
        workspace=1 << 20,
        optimization_level=5,
        compute_capabilities=("8.7",),  # TensorRT cannot be told its GPU; that is only recorded
    )
    library = RecordedLibrary()
    build_decoder(library, decoder, asked)
    assert library.arguments("IBuilderConfig", "set_memory_pool_limit") == [(library.MemoryPoolType.WORKSPACE, 1 << 20)]
    assert library.arguments("IBuilderConfig", "builder_optimization_level=") == [(5,)]


def test_weights_in_a_pattern_of_two_of_four_allow_sparse_kernels(decoder, config):
    library = RecordedLibrary()
    build_decoder(library, decoder, config, sparse=True)
    assert library.arguments("IBuilderConfig", "set_flag") == [(library.BuilderFlag.SPARSE_WEIGHTS,)]


def test_decode_is_the_first_profile_and_prefill_the_second(decoder, config):
    library = RecordedLibrary()
    build_decoder(library, decoder, config)
    shapes = library.arguments("IOptimizationProfile", "set_shape")
    half = len(shapes) // 2
    assert shapes[0] == ("input_ids", (1, 1), (1, 1), (4, 1))
    assert shapes[half] == ("input_ids", (1, 1), (1, 8), (1, 8))
    assert ("cache_slots", (8,), (16,), (32,)) in shapes[:half]
    assert ("past_key_values.0.key", (1, 2, 32, 16), (1, 2, 32, 16), (4, 2, 32, 16)) in shapes[:half]


@pytest.mark.parametrize("text", ["Unused Input: lengths", "node mixed: attribute softcap is ignored"])
def test_a_parser_that_says_that_something_was_left_out_fails_the_build(text, decoder, config):
    library = RecordedLibrary(parser_log=(("WARNING", text),))
    with pytest.raises(BuildError, match=r"the parser left out part of the graph, so that results would be wrong: "):
        build_decoder(library, decoder, config)
    assert not decoder.with_name("engine.plan").exists()


def test_what_the_builder_says_ends_no_build_and_harmless_warnings_are_no_remarks(decoder, config):
    """It may have worked for an hour, and means kernels, formats and platforms."""
    said = (
        ("WARNING", "Unused Input: x"),
        ("WARNING", "Unused Input: x"),
        ("WARNING", "Skipping tactic 0x2: unsupported by this layer"),
    )
    report = build_decoder(RecordedLibrary(log=said), decoder, config)
    assert [(message.severity, message.text) for message in report.messages] == list(said)
    assert remarks(report.messages) == ("Unused Input: x",)


@pytest.mark.parametrize(
    ("severity", "text", "error", "message"),
    [
        ("ERROR", "no kernel for n.mixed", BuildError, "building engine.plan failed: no kernel for n.mixed; try"),
        ("ERROR", "GPU memory: out of memory", ResourceError, "ask for a smaller context, chunk or batch"),
        ("ERROR", "cudaError 35: no driver", GpuError, "needs a GPU and its driver"),
        ("INTERNAL_ERROR", "assertion failed", BuildError, "assertion failed"),
    ],
)
def test_a_build_that_is_given_up_says_why(severity, text, error, message, decoder, config):
    """Of an internal error the builder says that it built."""
    library = RecordedLibrary(builds=severity == "INTERNAL_ERROR", log=((severity, text), (severity, text)))
    with pytest.raises(error, match=message):
        build_decoder(library, decoder, config)
    assert not decoder.with_name("engine.plan").exists()


def test_a_full_disk_is_told_and_leaves_nothing(decoder, config):
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    staged = decoder.with_name(".engine.plan.part")
    staged.symlink_to("/dev/full")
    with pytest.raises(ResourceError, match=r"engine.plan cannot be written \(No space left"):
        build_decoder(RecordedLibrary(), decoder, config)
    assert not decoder.with_name("engine.plan").exists()
    assert not staged.is_symlink()
