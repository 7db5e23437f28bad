"""ONNX Runtime as llmc opens graphs with it."""

from typing import Any

SESSION_CONFIG = {
    # Two graphs take turns on the same cores: the idle one must not spin, or it steals half of the machine.
    "session.force_spinning_stop": "1",
    # Work is handed out in shrinking blocks, so a thread that a neighbour slows down does not hold up the others.
    "session.dynamic_block_base": "4",
}
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
    return options


def inference_session(runtime: Any, graph: str | bytes, options: Any) -> Any:
    """ONNX Runtime's session of a graph on the CPU.

    The library's own second try, on the CPU too, is left out: it comes to the same and writes to stdout.
    """
    return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)
