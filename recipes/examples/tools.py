"""Tools: the model calls your function with arguments that follow the schema, and the conversation goes on.

python recipes/examples/tools.py BUNDLE

Needs the extra `guided`. A chat template that teaches calls determines their format; for others name one, as here.
`tool_choice="required"` makes even a model without training on calls make one; leave it out, and a trained model
decides by itself.
"""

import json
import sys
from typing import Any

from llmc.runtime import load

DOORS = {"front": "open", "back": "closed"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_at_door",
            "description": "Tell whether a door is open.",
            "parameters": {
                "type": "object",
                "properties": {"door": {"enum": [*DOORS]}},
                "required": ["door"],
                "additionalProperties": False,
            },
        },
    }
]


def main(bundle: str) -> list[dict[str, Any]]:
    """Ask, look at the doors that the model names, and let it answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Is the front door open?"}]
    with load(bundle) as model:
        handle = model.stream_chat(
            messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            tool_format="hermes",
            max_tokens=128,
            temperature=0,
        )
        for delta in handle.deltas():  # content, reasoning and pieces of calls, as they come
            print(delta.content, *(piece.name or piece.arguments for piece in delta.tool_calls), end="")
        message = handle.result().message
        messages.append(message.to_dict())
        for call in message.tool_calls:
            door = json.loads(call.arguments)["door"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": DOORS[door]})
        answer = model.chat(messages, tool_format="hermes", max_tokens=32, temperature=0)
    print(f"\n{answer.text}")
    return messages


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} BUNDLE")
    main(sys.argv[1])
