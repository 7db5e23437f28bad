"""Names of a prompt's blocks, by which requests that begin alike are known before any tokenizer has seen them."""

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

# The members of a request's body that make the prompt, in the order in which chat templates write them.
PROMPTS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("tools", "messages"),
    "/v1/completions": ("prompt",),
    "/api/chat": ("tools", "messages"),
    "/api/generate": ("system", "prompt"),
    "/v1/messages": ("tools", "system", "messages"),
    "/v1/responses": ("tools", "instructions", "input"),
}
KEYED = ("/v1/chat/completions", "/v1/responses")  # routes whose requests may have a prompt_cache_key
TEXTS = ("text", "input_text", "output_text")  # types of parts that are text
MARKS = ("cache_control", "id", "status")  # members of messages and parts that no template writes
# Characters; about the 32 tokens of a block of the prefix cache.
BLOCK = 128
# Of a longer prompt only the beginning counts: 131,072 characters.
MOST_BLOCKS = 1024


def prefix_of(path: str, body: bytes, scope: str | None = None) -> tuple[bytes, ...]:
    """A name for each block of the prompt, each made of all that stands before it, too; and before them one for the
    client's ``prompt_cache_key``, where it gives one. Those of different scopes differ.

    Two requests share as many names as their prompts share whole blocks from the beginning on; those of different keys
    share none, so that each key's have a replica to come back to. What is no prompt, no JSON or shorter than a block
    has no names of blocks; the replica will say what is wrong with it. ``scope``: only requests of the same one share
    cached prefixes.
    """
    if (members := PROMPTS.get(path)) is None:
        return ()
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            return ()
        key = request.get("prompt_cache_key")
        salt = _hash_text(scope, b"scope") if scope is not None else b""
        first = _hash_text(key, salt or b"key") if isinstance(key, str) and path in KEYED else b""
        return (*([first] if first else []), *_chain_names(_text(request, members), first or salt))
    except (ValueError, RecursionError):
        return ()


def _text(request: dict[str, Any], members: tuple[str, ...]) -> str:
    """The prompt as text, such that a longer conversation begins with the text of a shorter one."""
    pieces = [str(request.get("model"))]
    for member in members:
        value = request.get(member)
        if member == "input" and isinstance(value, str):  # short for a message of the user's
            value = [{"role": "user", "content": value}]
        plain = _plain(value)
        pieces += [plain] if isinstance(plain, str) else map(_write_text, plain if isinstance(plain, list) else [plain])
    return "\n".join(pieces)


def _plain(value: Any) -> Any:
    """Reduce a value to its meaning: parts of text become their texts, however they are marked.

    Clients move the marks of caches from turn to turn, and send answers back with names and states.
    """
    if isinstance(value, list):
        found = [_plain(item) for item in value]
        return "".join(found) if found and all(isinstance(item, str) for item in found) else found
    if not isinstance(value, dict):
        return value
    if value.get("type") in TEXTS and isinstance(value.get("text"), str):
        return value["text"]
    kept = {name: _plain(item) for name, item in value.items() if name not in MARKS}
    return kept if kept.get("type") != "message" else {name: item for name, item in kept.items() if name != "type"}


def _write_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _chain_names(text: str, former: bytes) -> Iterator[bytes]:
    for start in range(0, min(len(text) // BLOCK, MOST_BLOCKS) * BLOCK, BLOCK):
        former = _hash_text(text[start : start + BLOCK], former)
        yield former


def _hash_text(text: str, former: bytes) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), key=former, digest_size=16).digest()
