"""Calls of tools that a trained model writes, how many of them are read, and how many are right.

30 requests with three tools, greedy, `tool_choice` auto. Written are the names of tools that the raw output has after
`"name":`, which a regular expression counts; read are the calls of the message; right are those with the expected name
and arguments. `--teach FORMAT` tells the model of the tools in a message, where its chat template shows none.
"""

import argparse
import json
import re
from typing import Any

from llmc.runtime import load

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TIMER = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
SUM = {"type": "object", "properties": {name: {"type": "number"} for name in "ab"}, "required": ["a", "b"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
    for name, text, schema in (
        ("get_weather", "Get the present weather of a city.", CITY),
        ("set_timer", "Start a timer that rings after some minutes.", TIMER),
        ("add", "Add two numbers.", SUM),
    )
]
CITIES = ("Paris", "Oslo", "Lima", "Kyoto", "Cairo", "Quito", "Delhi", "Berlin")
ASKED: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    *((f"What is the weather in {city}?", [("get_weather", {"city": city})]) for city in CITIES),
    *((f"Set a timer for {n} minutes.", [("set_timer", {"minutes": n})]) for n in (3, 5, 8, 10, 12, 25, 45)),
    *((f"What is {a} plus {b}?", [("add", {"a": a, "b": b})]) for a, b in ((2, 3), (17, 25), (120, 7), (9, 91))),
    *((f"Add {a} and {b}.", [("add", {"a": a, "b": b})]) for a, b in ((4, 4), (33, 12), (250, 50))),
    *(
        (f"What is the weather in {a} and in {b}?", [("get_weather", {"city": a}), ("get_weather", {"city": b})])
        for a, b in (("Rome", "Madrid"), ("Tokyo", "Seoul"))
    ),
    (
        "Set a timer for 7 minutes, and tell me the weather in Vienna.",
        [("set_timer", {"minutes": 7}), ("get_weather", {"city": "Vienna"})],
    ),
    ("Add 1 and 2, and start a timer for 4 minutes.", [("add", {"a": 1, "b": 2}), ("set_timer", {"minutes": 4})]),
    *((text, []) for text in ("Hello!", "Who wrote Hamlet?", "Say thank you in French.", "What are you?")),
]
NAMED = re.compile(r'"name"\s*:\s*"(?:get_weather|set_timer|add)"')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--teach", metavar="FORMAT", help="a name of llmc.runtime.tools.formats.FORMATS")
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--show", action="store_true", help="print every raw output")
    args = parser.parse_args()
    written = read = right = wanted = 0
    told = 'You may call these functions, each call as {{"name": ..., "arguments": {{...}}}} and no other text: {}'
    before = [{"role": "system", "content": told.format(json.dumps(TOOLS))}] if args.teach else []
    options = {"temperature": 0, "max_tokens": 128, "repetition_penalty": args.repetition_penalty}
    with load(args.bundle) as model:
        for text, expected in ASKED:
            messages = [*before, {"role": "user", "content": text}]
            result = model.chat(messages, tools=TOOLS, tool_format=args.teach, **options)
            calls = [(call.name, _parse(call.arguments)) for call in result.message.tool_calls]
            written += len(NAMED.findall(result.outputs[0].text))
            read, wanted = read + len(calls), wanted + len(expected)
            right += sum(call in calls for call in expected)
            if args.show:
                print(f"{text}\n  {result.outputs[0].text!r}\n  {calls}", flush=True)
    print(f"{len(ASKED)} requests: {read} calls read of {written} written; {right} of {wanted} expected ones right")


def _parse(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:  # cut off by max_tokens
        return None


if __name__ == "__main__":
    main()
