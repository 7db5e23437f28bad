"""Bodies that do not fit, in one sentence that names the parameter."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from llmc.errors import printable
from llmc.runtime.server.errors import ApiError

# Places that are no names of parameters: parts of a request, and kinds of values, of which pydantic names all it tried.
KINDS = {"body", "header", "query", "path", "str", "int", "float", "bool"}
M = TypeVar("M", bound=BaseModel)
LONGEST_PARAM = 200  # characters of a place; clients invent names of any length


def api_error(found: Sequence[Mapping[str, Any]]) -> ApiError:
    """The refusal of a body, by the deepest of the faults that pydantic found; of a value that may be of several kinds
    this is the fault of the kind that it is."""
    fault = max(found, key=lambda each: len(each["loc"]))
    place = [part for part in fault["loc"] if part not in KINDS and "[" not in str(part)]
    param = printable(".".join(map(str, place)))[:LONGEST_PARAM] or None
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not a parameter of this route; leave it out", param=param)
    if fault["type"] == "json_invalid":
        reason = fault.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is no JSON ({reason}), expected an object", param=None)
    if param is None:
        return ApiError(400, "the body is no JSON object; send one, with the header content-type: application/json")
    text = fault["msg"][:1].lower() + fault["msg"][1:]
    return ApiError(400, f"{param} does not fit: {text}", param=param)


def read_json(kind: type[M], text: str) -> M:
    """The body that a text is.

    Raises:
        ApiError: it does not fit.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise api_error(error.errors()) from error
