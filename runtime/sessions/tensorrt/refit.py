"""Gives a stripped engine its weights, from the lowered graph that lies beside it in the bundle.

Not run on a GPU yet: the calls were checked against the interfaces of TensorRT 10.16, 11.4 and TensorRT-RTX 1.7.
"""

from pathlib import Path
from typing import Any

from llmc.errors import BundleError, GpuError
from llmc.runtime.sessions.tensorrt.library import logger

NAMED_AT_MOST = 4


def refit(library: Any, engine: Any, graph: Path) -> None:
    """Set every weight of ``engine`` from the graph's file and the weights beside it.

    Args:
        library: the module tensorrt or tensorrt_rtx.
        engine: a deserialized engine that was built stripped or refittable.
        graph: the ONNX file that it was built from.
    """
    native = logger(library)
    with native.collected() as messages:
        refitter = library.Refitter(engine, native.native)
        parser = library.OnnxParserRefitter(refitter, native.native)
        if not parser.refit_from_file(str(graph)):
            reasons = [parser.get_error(i).desc() for i in range(min(parser.num_errors, NAMED_AT_MOST))]
            raise BundleError(
                f"{graph} does not fit the engine ({'; '.join(reasons) or 'it gave no reason'}); build the bundle again"
            )
        missing = list(refitter.get_missing_weights())
        if missing:
            raise BundleError(
                f"{graph} lacks {len(missing)} weights of the engine, as {missing[0]}; build the bundle again"
            )
        if not refitter.refit_cuda_engine():
            said = "; ".join(message.text for message in messages[:NAMED_AT_MOST]) or "it said nothing"
            raise GpuError(f"the engine's weights cannot be set ({said}); rebuild the bundle on this machine")
