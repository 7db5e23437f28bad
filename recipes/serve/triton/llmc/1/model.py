"""llmc as a model of Triton's Python backend, with streams (decoupled responses) and cancelled requests.

Inputs and outputs are named as by Triton's generate extension, so POST /v2/models/llmc/generate_stream works.
"""

import asyncio
import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from llmc.errors import CancelledError, LlmcError, RequestError, UsageError
from llmc.runtime import load


class TritonPythonModel:
    """The bundle that config.pbtxt names."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load it; called once."""
        parameters = json.loads(args["model_config"])["parameters"]
        bundle = parameters["bundle"]["string_value"]
        options = json.loads(parameters.get("load", {}).get("string_value", "{}"))
        self.model = load(bundle, **options)

    async def execute(self, requests: list[Any]) -> None:
        """Answer requests, all at once with those of other calls: Triton awaits calls beside one another."""
        await asyncio.gather(*map(self._answer, requests))

    def finalize(self) -> None:
        """End the model; called once, when no request is left."""
        self.model.close()

    async def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            final = await self._generate(request, sender)
        except (LlmcError, ValueError, TypeError) as error:
            final = pb_utils.InferenceResponse(error=_make_error(error))
        sender.send(final, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _generate(self, request: Any, sender: Any) -> Any:
        """Send the pieces, if the request wants them; the last response, which has all if it does not."""
        streams = bool(_value(request, "stream"))
        sampling = json.loads(_text(request, "sampling_parameters") or "{}")
        handle = self.model.stream(_text(request, "text_input"), **sampling)
        async for delta in handle.events_async():
            if sender.is_cancelled():
                handle.cancel()
            elif streams and delta.text:
                sender.send(_response(delta.text, ""))
        result = await handle
        return _response("" if streams else result.text, result.outputs[0].finish_reason)


def _value(request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().flat[0]


def _text(request: Any, name: str) -> str:
    value = _value(request, name)
    return value.decode("utf-8") if isinstance(value, bytes) else value or ""


def _response(text: str, finish_reason: str) -> Any:
    values = {"text_output": text, "finish_reason": finish_reason}
    tensors = [pb_utils.Tensor(name, np.array([value.encode()], np.object_)) for name, value in values.items()]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _make_error(error: Exception) -> Any:
    kind = pb_utils.TritonError
    if isinstance(error, CancelledError):
        return kind(str(error), kind.CANCELLED)
    fault = isinstance(error, RequestError | UsageError | ValueError | TypeError)
    return kind(str(error), kind.INVALID_ARG if fault else kind.UNAVAILABLE)
