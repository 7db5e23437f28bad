"""A double of ``triton_python_backend_utils``: what the documentation of Triton's Python backend says of the parts that
the recipe uses, decoupled responses and cancelled requests included."""

from __future__ import annotations

from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonError:
    """An error of a request, with a code."""

    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        self.message, self.code = message, code


class Tensor:
    """A tensor with a name."""

    def __init__(self, name: str, value: np.ndarray) -> None:
        assert isinstance(value, np.ndarray)
        self._name, self._value = name, value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._value


class InferenceResponse:
    """Tensors, or an error."""

    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors or []}
        self.error = error

    def text(self, name: str) -> str:
        """A tensor of one string, which travels as bytes."""
        value = self.tensors[name]
        assert value.dtype == np.object_ and value.shape == (1,) and isinstance(value[0], bytes)
        return str(value[0], "utf-8")


class Sender:
    """Takes responses, until the final one; ``cancel_after`` of them the client cancels."""

    def __init__(self, cancel_after: int | None) -> None:
        self.responses: list[InferenceResponse] = []
        self.final = False
        self._cancel_after = cancel_after

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.final, "nothing may be sent after the final response"
        self.final = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if response is not None:
            self.responses.append(response)

    def is_cancelled(self) -> bool:
        return self._cancel_after is not None and len(self.responses) >= self._cancel_after


class InferenceRequest:
    """A request by the values of its inputs."""

    def __init__(self, *, cancel_after: int | None = None, **inputs: Any) -> None:
        self.sender = Sender(cancel_after)
        self.tensors = {
            name: Tensor(name, np.array([value.encode() if isinstance(value, str) else value], _type(value)))
            for name, value in inputs.items()
        }

    def get_response_sender(self) -> Sender:
        return self.sender


def _type(value: Any) -> Any:
    return np.object_ if isinstance(value, str) else np.bool_


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """The tensor, or None for an optional one that was not sent."""
    return request.tensors.get(name)
