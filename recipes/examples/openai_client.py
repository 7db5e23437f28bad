"""Query the service with OpenAI's client: an answer, a stream, and JSON by a schema. Needs `pip install openai`.

llmc serve BUNDLE
python recipes/examples/openai_client.py http://127.0.0.1:8000
"""

import json
import sys

from openai import OpenAI

SCHEMA = {
    "name": "door",
    "schema": {
        "type": "object",
        "properties": {"open": {"type": "boolean"}},
        "required": ["open"],
        "additionalProperties": False,
    },
}


def main(address: str) -> str:
    client = OpenAI(base_url=f"{address}/v1", api_key="none")  # a key, if the service requires one
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is gravity?"}], max_tokens=32, temperature=0
    )
    print(answer.choices[0].message.content)
    text = ""
    for chunk in client.completions.create(model=model, prompt="def add(a, b):", max_tokens=16, stream=True, seed=1):
        for choice in chunk.choices:
            text += choice.text
            print(choice.text, end="", flush=True)
    print()
    door = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Is the door open?"}],
        response_format={"type": "json_schema", "json_schema": SCHEMA},  # type: ignore[arg-type, typeddict-item]
        max_tokens=256,
        seed=3,
        extra_body={"min_p": 0.1},  # llmc's own parameters go here
    )
    print(json.loads(door.choices[0].message.content or "{}"))
    return text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} ADDRESS")
    main(sys.argv[1])
