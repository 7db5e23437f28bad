"""Bodies of requests: read strictly, with every sampling parameter of llmc beside those of the dialect."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema

from llmc.runtime import SamplingParams
from llmc.runtime.server.http.call import Call
from llmc.runtime.server.http.errors import ApiError

# Parameters whose names mean something else in a dialect, or which it has under another name or type.
SPOKEN = {"max_tokens", "stop", "logprobs", "logit_bias", "n", "best_of", "prompt_logprobs", "detokenize"}
LARGEST_BIAS = 100
# Values of JSON by the kind of a parameter's range; choices are spelt out.
KINDS: dict[str, Any] = {
    "integer": int,
    "number": float,
    "flag": bool,
    "text": str,
    "texts": list[str],
    "words": list[str | list[int]],
    "tokens": list[int],
    "schema": dict[str, Any] | str,
}


def ignore(info: ValidationInfo, name: str) -> None:
    """Name an ignored parameter to the call whose body is validated."""
    if isinstance(info.context, Call):
        info.context.ignore(name)


def _fail_fast(schema: Any) -> None:
    """Let lists and objects end at the first wrong item: a million of errors would take minutes and gigabytes."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Body(BaseModel):
    """A body that clients send, or an object in one: null is absent, nothing else is converted, and a parameter that
    is not known here is refused by name, or with ``extra="ignore"`` named in the header x-llmc-ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Names of members that cannot change an answer: accepted, and told of in the header x-llmc-ignored."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name in sorted(cls.IGNORED & given.keys()):
            if given[name] not in (None, [], {}):
                ignore(info, name)
        kept = {name: value for name, value in given.items() if value is not None and name not in cls.IGNORED}
        extra = cls.model_config.get("extra")
        if extra == "ignore":
            known = cls._known()
            for name in kept:
                if name not in known:
                    ignore(info, name)
        elif len(kept) > len(cls.model_fields) and extra == "forbid":
            known = cls._known()
            unknown = next(name for name in kept if name not in known)  # one of a million is enough to refuse
            kept = {name: value for name, value in kept.items() if name in known or name == unknown}
        return kept

    @classmethod
    def _known(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        found = handler(source)
        _fail_fast(found)
        return found


class Asked(Body):
    """The whole body of a request."""

    _call: Call = PrivateAttr(default_factory=Call)

    def model_post_init(self, context: Any) -> None:
        """Remember the call, which :meth:`ignore` tells."""
        if isinstance(context, Call):
            self._call = context

    def ignore(self, name: str) -> None:
        """See :meth:`llmc.runtime.server.http.call.Call.ignore`."""
        self._call.ignore(name)


class Lenient(Body):
    """A body of which members that are not known here are ignored, and named in the header x-llmc-ignored."""

    model_config = ConfigDict(extra="ignore")


class Other(Body):
    """A tool or an item of a type that is not known here: it is left out, and named in the header x-llmc-ignored."""

    model_config = ConfigDict(extra="allow")
    type: str


def kind_among(*known: str) -> Discriminator:
    """Tell objects of these types from others, which are ``:other``, and from texts, which are ``:word``; an object
    without a type is of the first one. The colon tells tags from members in the places of faults."""

    def kind(given: Any) -> str:
        if isinstance(given, str):
            return ":word"
        found = (given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)) or known[0]
        return f":{found if found in known else 'other'}"

    return Discriminator(kind)


# Members that all routes for chats have.
ToolFormat = Annotated[
    str | None, Field(description="how the model writes calls, where its template teaches none; extension of llmc")
]
# In one line, so that nobody forges another one.
Logged = Annotated[str | None, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$", description="for the log")]
Verbosity = Annotated[
    Literal["low", "medium", "high"] | None, Field(description="for templates that show it; medium is for all")
]
# OpenAI's, by token ids as the texts that JSON wants for names.
LogitBias = (
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]]
    | None
)


def list_texts(name: str, given: Any, most: int) -> list[Any]:
    """Texts, or their tokens, one by one. Raises ApiError: there are none, or too many."""
    several = isinstance(given, list) and not (given and isinstance(given[0], int))
    found = given if several else [given]
    if not 1 <= len(found) <= most:
        raise ApiError(400, f"{name} holds {len(found)} texts, expected 1 to {most}", param=name)
    return found


def _collect_sampling() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(SamplingParams):
        stated = field.metadata["parameter"]
        if field.name not in SPOKEN:
            kind = Literal[stated.range.choices] if stated.range.choices else KINDS[stated.range.kind]
            text = f"{stated.meaning}; {stated.range.expected}; extension of llmc unless the dialect has it"
            found[field.name] = (Annotated[kind | None, Field(description=text)], None)
    return found


# Fields that are arguments under the same name.
NAMES = (
    *(field.name for field in fields(SamplingParams) if field.name not in SPOKEN),
    "priority",
    "deadline_s",
    "parse_special",
)

if TYPE_CHECKING:
    _Sampling = Asked
else:
    _Sampling = create_model("_Sampling", __base__=Asked, **_collect_sampling())


ANY = -1  # of parameters that other servers take for none by this value


class StructuredOutputs(Body):
    """vLLM's form of the output."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None

    def form(self) -> dict[str, Any]:
        schema = {"type": "object"} if self.json_object and self.json_schema is None else self.json_schema
        forms = {"json_schema": schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return {**forms, "compact_json": self.disable_any_whitespace}


class Sampled(_Sampling):
    """The parameters that all requests for text have."""

    priority: Annotated[int | None, Field(description="-1000 to 1000, lower is sooner; extension of llmc")] = None
    deadline_s: Annotated[float | None, Field(description="seconds after which it fails; extension of llmc")] = None
    parse_special: Annotated[
        bool | None,
        Field(description="special tokens that texts spell are special tokens, where the server allows it; extension"),
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, Field(description="vLLM's word for the form")] = None

    @model_validator(mode="before")
    @classmethod
    def _respell(cls, given: Any) -> Any:
        """Other servers' spellings in llmc's words."""
        if not isinstance(given, Mapping):
            return given
        found = {name: value for name, value in given.items() if not (name == "seed" and _is(value, ANY))}
        if _is(found.get("top_k"), ANY):
            found["top_k"] = 0
        if _is(found.get("top_p"), 0):  # nothing but the most probable token
            found = {**found, "top_p": None, "temperature": 0}
        return found

    @property
    def form_names(self) -> dict[str, str]:
        """Names of a form's parameters where the request has them in vLLM's words or in llmc's own."""
        if self.structured_outputs is not None:
            vllm = {name: f"structured_outputs.{name}" for name in ("regex", "choice", "grammar")}
            return {**vllm, "json_schema": "structured_outputs.json", "compact_json": "structured_outputs"}
        given = ("json_schema", "regex", "choice", "grammar")
        return {name: name for name in given if getattr(self, name) is not None}

    def sampling(self, **own: Any) -> dict[str, Any]:
        """Arguments of :meth:`llmc.runtime.Model.stream`: the parameters given here, and ``own`` before them.
        Raises ApiError: a parameter is given under two names."""
        given = {name: value for name in NAMES if (value := getattr(self, name)) is not None}
        own = {name: value for name, value in own.items() if value is not None}
        if biases := own.get("logit_bias"):
            own["logit_bias"] = {int(token): bias for token, bias in biases.items()}
        if self.structured_outputs is not None:
            form = {name: value for name, value in self.structured_outputs.form().items() if value is not None}
            if twice := sorted(form.keys() & {**given, **own}.keys()):
                said = f"structured_outputs gives {twice[0]}, which another parameter does too; leave one out"
                raise ApiError(400, said, param="structured_outputs")
            own |= form
        if twice := sorted(given.keys() & own.keys()):
            raise ApiError(400, f"{twice[0]} is given twice, once by another parameter; leave one out", param=twice[0])
        return {**given, **own}


def _is(value: Any, number: int) -> bool:
    """True if a value of JSON is this number, and no truth value."""
    return not isinstance(value, bool) and isinstance(value, int | float) and value == number
