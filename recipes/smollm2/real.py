"""SmolLM2-135M-Instruct, a real model, held against transformers and llama.cpp.

    make real                                              # what follows, without llama.cpp
    python recipes/smollm2/real.py --llamacpp-python PATH  # the interpreter of the llama.cpp peer: see benchmarks/

1. The tokens of 500 texts, by the exported tokenizer and by llama.cpp; transformers' reading of a GGUF does not know
   that this tokenizer takes digits one by one, so its count is shown and not judged.
2. The greedy answers of the float32 bundle to 20 questions, and transformers' in float32, from the weights that the
   export holds: those of Q4_1 rounded to float16.
3. Bundles beside llama.cpp's quantizations by KL and bits per weight, on English text that no calibration sees, by
   benchmarks/quality_per_bit.py.

Ends with 1 where the first or the second differ. Files go to build/real and stay there.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}

RECIPES = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(RECIPES))

import torch  # noqa: E402
from smollm2.fetch import MODEL, FetchError, fetch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: E402

from llmc.cli import output as show  # noqa: E402
from llmc.export import export  # noqa: E402
from llmc.export.streaming import StreamedDecoder  # noqa: E402
from llmc.optimize.build import build  # noqa: E402
from llmc.optimize.calibrate.request import CalibrationRequest  # noqa: E402
from llmc.optimize.calibrate.text import held_out_text  # noqa: E402
from llmc.optimize.recipe import find_recipe, read_recipe  # noqa: E402
from llmc.runtime import load  # noqa: E402
from llmc.runtime.text.tokenizer import Tokenizer  # noqa: E402

FOLDER = Path("build/real")
TEXTS, NEW_TOKENS = 500, 32
LONGEST_TEXT = 200  # characters
# Written for this purpose: facts, rules, code, other languages, and a few that the model cannot know.
QUESTIONS = (
    "What is gravity?",
    "Name three primary colours.",
    "Why is the sky blue?",
    "What is 7 times 8?",
    "Write a haiku about the sea.",
    "How do I boil an egg?",
    "What is the capital of France?",
    "Explain what a CPU does to a child.",
    "Translate 'good morning' into Spanish.",
    "Give me a word that rhymes with cat.",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
    "What does HTTP stand for?",
    "Summarise: The meeting was moved from Monday to Friday because the room was not free.",
    "Is a tomato a fruit or a vegetable?",
    "List the days of the week.",
    "What is photosynthesis?",
    "Complete the sentence: Once upon a time",
    "How many legs does a spider have?",
    "Was ist die Hauptstadt von Deutschland?",
)
OWN = Path(__file__).parent
BUILDS = {
    "int8": find_recipe("int8"),
    "int4": find_recipe("int4"),
    "int4-balanced": find_recipe("int4-balanced"),
    "int4-small-memory": find_recipe("int4-small-memory"),
    "smollm2-int4": OWN / "int4.toml",
    "smollm2-int4-calibrated": OWN / "int4-calibrated.toml",
}
SAMPLES, LENGTH = 32, 256  # of the calibration, for recipes that want one
WINDOWS = 10  # of so many tokens, of the held-out text


@torch.no_grad()
def transformers_model(path: Path) -> Any:
    """The GGUF as transformers reads it, in float32, with the weights of the layers rounded to float16 as export does.

    ``from_pretrained`` would want the package accelerate for that.
    """
    config = load_gguf_checkpoint(path)["config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().eval()
    found = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    model.load_state_dict(found["tensors"], strict=False)
    model.tie_weights()
    for parameter in model.model.layers.parameters():
        if parameter.ndim > 1:  # Q4_1 in this file; what is not in blocks stays float32 in the export
            parameter.copy_(parameter.half())
    return model


def texts() -> list[str]:
    """Pieces of the text that comes with llmc, and what tokenizers trip over."""
    whole = held_out_text() + "\n\n".join(QUESTIONS)
    step = max(1, (len(whole) - LONGEST_TEXT) // (TEXTS - len(ODDITIES)))
    pieces = [whole[i * step : i * step + 1 + (i * 37) % LONGEST_TEXT] for i in range(TEXTS - len(ODDITIES))]
    return [*ODDITIES, *pieces]


ODDITIES = (
    "",
    " ",
    "   leading",
    "trailing   ",
    "\n\n\t\n",
    "1234567890",
    "3.14159e-10",
    "don't won't I'LL they'Re",
    "ÄÖÜ ß ñ ç",
    "東京は日本の首都です。",
    "Привет, мир!",
    "مرحبا بالعالم",
    "🙂🙃👩‍👩‍👧",
    "a\u0301 \u200b \ufeff",
    "<|im_start|>user\nHi<|im_end|>",
    "def f(x):\n    return x**2\n",
    "http://example.com/?a=b&c=d#e",
    "\r\n\r\n",
    "A" * 100,
    "\u0000\u0001\u007f",
)


def equal_tokens(exported: Path, model: Path, llamacpp: Path | None) -> bool:
    """Compare tokens, and say on how many texts they are equal."""
    ours, sample = Tokenizer.from_folder(exported), texts()
    theirs = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    found = [ours.encode(text, add_special_tokens=False) for text in sample]
    wanted = {"transformers": [theirs.encode(text, add_special_tokens=False) for text in sample]}
    if llamacpp is not None:
        script = RECIPES / "benchmarks" / "llamacpp_tokens.py"
        done = subprocess.run(
            [llamacpp, script, model], input=json.dumps(sample), capture_output=True, text=True, check=True
        )
        wanted["llama.cpp"] = json.loads(done.stdout)
    for name, tokens in wanted.items():
        different = [text for text, a, b in zip(sample, found, tokens, strict=True) if a != b]
        print(f"tokens equal to those of {name}: {len(sample) - len(different)} of {len(sample)} texts")
        for text in different[:5]:
            print(f"  not of {text!r}")
    return wanted.get("llama.cpp", found) == found


@torch.inference_mode()
def equal_answers(bundle: Path, reference: Any, tokenizer: Any) -> bool:
    """Compare greedy answers token by token, and say how many are equal."""
    same = 0
    with load(bundle) as model:
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            ours = model.chat(messages, max_tokens=NEW_TOKENS, temperature=0).token_ids
            prompt = torch.tensor([model.chat_tokens(messages)])
            out = reference.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
            theirs = out[0, prompt.shape[1] :].tolist()
            equal = _without_end(ours, tokenizer) == _without_end(theirs, tokenizer)
            same += equal
            if not equal:
                print(f"  {question!r}: {tokenizer.decode(ours)!r} is not {tokenizer.decode(theirs)!r}")
    print(f"greedy answers equal to those of transformers: {same} of {len(QUESTIONS)}, of {NEW_TOKENS} tokens each")
    return same == len(QUESTIONS)


def _without_end(ids: Sequence[int], tokenizer: Any) -> list[int]:
    return [token for token in ids if token != tokenizer.eos_token_id]


def main() -> int:
    """Run all of it; 1 if tokens or answers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamacpp-python", type=Path, help="interpreter that has llama-cpp-python")
    args = parser.parse_args()
    try:
        model = fetch(Path("build/smollm2"))
    except FetchError as error:
        print(f"{MODEL} cannot be fetched: {error}", file=sys.stderr)
        return 1
    exported = export(model, FOLDER / "export", force=True)
    print(f"exported in {exported.seconds:.1f} s; " + "; ".join(exported.notes))
    reference = transformers_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    same = equal_tokens(exported.output, model, args.llamacpp_python)
    build(exported.output, FOLDER / "fp32", precision="fp32", force=True)
    same &= equal_answers(FOLDER / "fp32", reference, tokenizer)
    asked = CalibrationRequest(StreamedDecoder, samples=SAMPLES, length=LENGTH)
    for name, recipe in BUILDS.items():
        wanted = asked if recipe is not None and read_recipe(recipe).scheme == "gptq" else None
        report = build(exported.output, FOLDER / name, recipe=recipe, calibration=wanted, force=True)
        print(f"{name}: {show.size(report.size)} in {report.seconds:.0f} s")
    reference.save_pretrained(FOLDER / "checkpoint")
    tokenizer.save_pretrained(FOLDER / "checkpoint")
    return compare(args.llamacpp_python) if same else 1


def compare(llamacpp: Path | None) -> int:
    """Print the table of KL and bits; the exit code of what makes it."""
    text = FOLDER / "english.txt"
    text.write_text(held_out_text(), encoding="utf-8")
    windows = ["--windows", str(WINDOWS), "--length", str(LENGTH)]
    command = [sys.executable, RECIPES / "benchmarks" / "quality_per_bit.py", *(FOLDER / name for name in BUILDS)]
    command += ["--checkpoint", FOLDER / "checkpoint", "--text", text, *windows]
    command += ["--llamacpp-python", llamacpp] if llamacpp is not None else []
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
