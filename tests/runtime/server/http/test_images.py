"""Images in bodies of three dialects: the data itself reaches the model, addresses and what is no image are refused."""

import base64
from typing import Any

import pytest
from doubles.images import draw, encode

from llmc.runtime.server.dialects import openai_chat, responses
from llmc.runtime.server.dialects.anthropic import MessageRequest
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.images import decode_base64

PNG = encode(draw("RGB", 9, 7))
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
SEEN = [{"type": "image", "image": PNG}, {"type": "text", "text": "What is this?"}]
ROUTES = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def body(dialect: str, url: str) -> dict[str, Any]:
    """A request about an image; Anthropic's has an address where it is no data."""
    if dialect == "chat":
        image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        content = [image, {"type": "text", "text": "What is this?"}]
        return {"model": "able", "messages": [{"role": "user", "content": content}]}
    if dialect == "responses":
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is this?"}]
        return {"model": "able", "input": [{"role": "user", "content": parts}]}
    source = {"type": "url", "url": url}
    if url.startswith("data:"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    return {"model": "able", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}


def test_chat_completions_hand_the_bytes_on():
    asked = openai_chat.ChatRequest.model_validate(body("chat", URL))
    assert openai_chat.conversation(asked.messages) == [{"role": "user", "content": SEEN}]


def test_responses_hand_the_bytes_on_and_keep_what_was_sent():
    (item,) = responses.ResponseRequest.model_validate(body("responses", URL)).input
    kept = responses._name_item(item)
    assert kept["content"][0] == {"type": "input_image", "image_url": URL}
    assert responses.plain([kept]) == [{"role": "user", "content": SEEN}]


@pytest.mark.parametrize("failed", [False, True])
def test_a_tool_may_answer_with_an_image(failed):
    asked = body("messages", URL)
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": failed, "content": asked["messages"][0]["content"]}
    asked["messages"] += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    *_, answer = MessageRequest.model_validate(asked).plain()
    before = [{"type": "text", "text": "Error: "}] if failed else []
    assert answer == {"role": "tool", "tool_call_id": "a", "content": [*before, *SEEN]}


def test_messages_hand_the_bytes_on_in_a_turn_of_several():
    asked = body("messages", URL)
    asked["messages"].append({"role": "user", "content": "Say it."})
    assert MessageRequest.model_validate(asked).plain() == [
        {"role": "user", "content": [SEEN[0], {"type": "text", "text": "What is this?\nSay it."}]}
    ]


@pytest.mark.threat("no-fetch")
@pytest.mark.parametrize("dialect", ROUTES)
@pytest.mark.parametrize(
    ("url", "said"),
    [
        (URL, "holds an image, and the model takes text alone"),
        ("http://127.0.0.1/cat.png", "expected"),
        ("file:///etc/passwd", "expected"),
        ("data:image/png;base64,%%%", "is no base64"),
        ("data:image/png;base64,AAA", "is no base64"),
    ],
)
def test_the_text_of_a_refusal_says_why(able_http, dialect, url, said):
    headers = {"anthropic-version": "2023-06-01"} if dialect == "messages" else {}
    answer = able_http.post(ROUTES[dialect], json=body(dialect, url), headers=headers)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_what_is_no_base64_is_named_by_its_place():
    with pytest.raises(ApiError, match=r"messages\[3\] is no base64"):
        decode_base64("a b", "messages[3]")
