"""ONNX Runtime as llmc opens graphs with it."""

from typing import Any

from llmc.runtime.host.machine import saturates

SESSION_CONFIG = {
    # Two graphs take turns on the same cores: the idle one must not spin, or it steals half of the machine.
    "session.force_spinning_stop": "1",
    # Work is handed out in shrinking blocks, so a thread that a neighbour slows down does not hold up the others.
    "session.dynamic_block_base": "4",
    # A kernel that adds before it normalizes takes 13 ms where two take 2 (4,096 rows of 384 values, onnxruntime 1.32).
    "optimization.disable_specified_optimizers": "SkipLayerNormFusion",
}
# int8 weights of integer products become uint8 while a graph is opened, one by one: 2 s more for 358 million. Kernels
# of uint8 add in 32 bits: 5 to 35 % slower than those that saturate, at 32 rows or more still in 0.4 to 0.8 of the time
# of MatMulNBits. Where there is VNNI, the library would give up its kernels too.
EXACT = "session.x64quantprecision", "1"
# Weights are read where the caller has mapped them; ONNX Runtime before 1.32 copies them.
IN_PLACE, IN_PLACE_SINCE = ("session.use_external_initializer_file_buffers_directly", "1"), "1.32"
# All threads pack, and raw weights stay until the last one is packed: for those whose pages are let go of meanwhile.
PACK_TOGETHER = "session.prepack.enable_parallel", "1"
LOG_FATAL_ONLY = 4  # every other error comes as an exception


def session_options(runtime: Any, threads: int) -> Any:
    """ONNX Runtime's options for a graph of ours."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = LOG_FATAL_ONLY
    # Planning which intermediate tensors share memory takes time quadratic in the graph, half of the time to open it.
    # The arena reuses what is freed just as well.
    options.enable_mem_reuse = False
    for key, value in SESSION_CONFIG.items():
        options.add_session_config_entry(key, value)
    multiply_exactly(options)
    return options


def multiply_exactly(options: Any) -> None:
    """Ask for products of integers that do not saturate, on CPUs where they would."""
    if saturates():
        options.add_session_config_entry(*EXACT)


def inference_session(runtime: Any, graph: str | bytes, options: Any) -> Any:
    """ONNX Runtime's session of a graph on the CPU.

    The library's own second try, on the CPU too, is left out: it comes to the same and writes to stdout.
    """
    return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)
