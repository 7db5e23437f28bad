"""Output that a program can parse: it always follows the schema. Needs the extra `guided`.

python recipes/examples/json_schema.py BUNDLE
"""

import json
import sys

from llmc.runtime import load

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "open": {"type": "boolean"}},
    "required": ["size", "open"],
    "additionalProperties": False,
}


def main(bundle: str) -> dict[str, object]:
    """Ask for an object; a small model may write much white space, so it gets room."""
    with load(bundle) as model:
        result = model.generate("door = ", max_tokens=256, temperature=0.7, seed=3, json_schema=SCHEMA)
    answer: dict[str, object] = json.loads(result.text)
    print(answer, result.finish_reason)
    return answer


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} BUNDLE")
    main(sys.argv[1])
