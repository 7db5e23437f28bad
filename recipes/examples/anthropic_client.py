"""Query the service with Anthropic's client: an answer and a stream. Needs `pip install anthropic`.

llmc serve BUNDLE
python recipes/examples/anthropic_client.py http://127.0.0.1:8000
"""

import sys

from anthropic import Anthropic


def main(address: str) -> str:
    client = Anthropic(base_url=address, api_key="none")  # a key, if the service requires one
    model = client.models.list().data[0].id
    answer = client.messages.create(
        model=model, max_tokens=32, messages=[{"role": "user", "content": "What is gravity?"}]
    )
    print(*(block.text for block in answer.content if block.type == "text"), answer.stop_reason)
    with client.messages.stream(
        model=model,
        max_tokens=32,
        system="Answer in one sentence.",
        messages=[{"role": "user", "content": "What is gravity?"}],
    ) as stream:
        text = ""
        for piece in stream.text_stream:
            text += piece
            print(piece, end="", flush=True)
    print()
    return text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} ADDRESS")
    main(sys.argv[1])
