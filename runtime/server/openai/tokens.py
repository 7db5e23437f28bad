"""Models and their tokens: what is served, and how texts and messages are seen by it."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from llmc.runtime import Model
from llmc.runtime.engine.input_processor import text_tokens
from llmc.runtime.model import template_variables
from llmc.runtime.server.http.aside import SHORT
from llmc.runtime.server.http.bodies import Body
from llmc.runtime.server.http.errors import ApiError, name_parameters
from llmc.runtime.server.http.streams import make_answer
from llmc.runtime.server.http.validation import take_body
from llmc.runtime.server.models.service import Served, Service
from llmc.runtime.server.openai.chat import ChatMessage, Tool, conversation
from llmc.runtime.text.shown import render_messages

router = APIRouter(tags=["Models and tokens"])
CHARACTERS = 4  # of a template's text that are charged as a token, for it is not tokenized


def card(service: Service, name: str) -> dict[str, Any]:
    manifest = service.pool.manifest(name)
    about = {
        "fingerprint": manifest.source.fingerprint,
        "target": manifest.target.name,
        "precision": manifest.recipe.precision,
        "generates": manifest.geometry.encoder is None,
        "chats": manifest.geometry.encoder is None and service.pool.has_template(name),
        "sees": manifest.geometry.vision is not None,
    }
    base = service.pool.base(name)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "llmc",
        "root": base,
        "parent": None if base == name else base,
        "max_model_len": service.config.max_context or manifest.limits.max_context,
        "x_llmc": about,
    }


@router.get("/v1/models")
async def models(service: Served) -> dict[str, Any]:
    """The models that are served to this client; the first of all answers requests that name none."""
    return {"object": "list", "data": [card(service, name) for name in service.names]}


@router.get("/v1/models/{name}")
async def model(name: str, service: Served) -> dict[str, Any]:
    """One model."""
    return card(service, service.name(name))


class Rendered(Body):
    """A conversation as the model's chat template renders it."""

    model: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1)] = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def plain(self) -> dict[str, Any]:
        """The conversation as the model's methods take it.
        Raises ApiError: parameters contradict each other, or a message has what its role has not."""
        begins = self.add_generation_prompt and not self.continue_final_message
        if self.add_generation_prompt and not begins and "add_generation_prompt" in self.model_fields_set:
            said = "add_generation_prompt is true, and continue_final_message too; leave one of them out"
            raise ApiError(400, said, param="add_generation_prompt")
        return {
            "messages": conversation(self.messages or []),
            "tools": [tool.function.plain() for tool in self.tools] if self.tools else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "add_generation_prompt": begins,
            "continue_final_message": self.continue_final_message,
        }


class TokenizeRequest(Rendered):
    """A text, or a conversation."""

    prompt: str | None = None
    add_special_tokens: bool = True


# Parameters of a conversation, and of a text, that mean nothing for the other one.
OF_MESSAGES = {"tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
OF_PROMPTS = {"add_special_tokens"}


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=1_000_000)]
    skip_special_tokens: bool = False


class TemplateRequest(Rendered):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    documents: list[dict[str, Any]] | None = None


@router.post("/tokenize")
async def tokenize(body: Annotated[TokenizeRequest, take_body(TokenizeRequest)], service: Served) -> Response:
    """The tokens of a text, or those of the prompt that a conversation becomes."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt and messages are both given or both missing, expected one of them", param="prompt")
    other, names = ("messages", OF_MESSAGES) if body.messages is None else ("prompt", OF_PROMPTS)
    if idle := sorted(name for name in body.model_fields_set & names if getattr(body, name) is not None):
        raise ApiError(400, f"{idle[0]} is given without {other}; leave it out", param=idle[0])
    async with service.model(body.model) as loaded:
        with name_parameters({"prompt": "prompt" if body.messages is None else "messages"}):
            found = await service.tokenize_in_thread(partial(_tokens_of, loaded, body), len)
        told = {"tokens": found, "count": len(found), "max_model_len": loaded.max_context}
        return await make_answer(lambda: told, large=len(found) > SHORT)


def _tokens_of(model: Model, body: TokenizeRequest) -> list[int]:
    """The tokens, if the context could hold them or hardly any more."""
    if body.prompt is None:
        return model.chat_tokens(**body.plain())
    encode = partial(model.tokenizer.encode, add_special_tokens=body.add_special_tokens)
    return text_tokens(model.tokenizer, body.prompt, encode, model.max_context, None)


@router.post("/detokenize")
async def detokenize(body: Annotated[DetokenizeRequest, take_body(DetokenizeRequest)], service: Served) -> Response:
    """The text of tokens, special ones included unless they are to be skipped."""
    async with service.model(body.model) as loaded:
        text = await service.tokenize_in_thread(partial(_text_of, loaded, body), lambda text: len(body.tokens))
        return await make_answer(lambda: {"prompt": text}, large=len(text) > SHORT)


def _text_of(model: Model, body: DetokenizeRequest) -> str:
    if len(body.tokens) > model.max_context:
        said = f"tokens holds {len(body.tokens)} tokens, expected at most {model.max_context}; send them in parts"
        raise ApiError(400, said, param="tokens", code="context_length_exceeded")
    size = model.tokenizer.vocab_size
    if (wrong := next((token for token in body.tokens if not 0 <= token < size), None)) is not None:
        raise ApiError(400, f"tokens holds {wrong}, expected ids from 0 to {size - 1}", param="tokens")
    return model.tokenizer.decode(body.tokens, body.skip_special_tokens)


@router.post("/apply-template")
async def apply_template(body: Annotated[TemplateRequest, take_body(TemplateRequest)], service: Served) -> Response:
    """The prompt that a conversation becomes, as text; tokens that messages spell are shown as they were written."""
    async with service.model(body.model) as loaded:
        text = await service.tokenize_in_thread(partial(_prompt_of, loaded, body), lambda text: len(text) // CHARACTERS)
        return await make_answer(lambda: {"prompt": text}, large=len(text) > SHORT)


def _prompt_of(model: Model, body: TemplateRequest) -> str:
    plain = body.plain()
    variables = {**template_variables(plain.pop("chat_template_kwargs")), "documents": body.documents}
    return render_messages(model.chat_template, **plain, **variables)
