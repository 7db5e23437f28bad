"""Convert a Hugging Face checkpoint with llama.cpp's own converter, whatever its tokenizer, and quantize it.

    python convert_gguf.py LLAMA_CPP CHECKPOINT PREFIX f16 q8_0 ...     # PREFIX-f16.gguf, PREFIX-q8_0.gguf, ...
    python convert_gguf.py LLAMA_CPP CHECKPOINT PREFIX mmproj           # PREFIX-mmproj.gguf: the tower in Q8_0

Run it with the interpreter of the llama.cpp peer; LLAMA_CPP is a folder with its sources.
"""

import argparse
import ctypes
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# llama_ftype, and True if all matrices get that type: llama.cpp keeps some, such as a tied head, in more bits.
SCHEMES = {
    "f16": (1, True),
    "q4_0": (2, False),
    "q4_0_pure": (2, True),
    "q8_0": (7, False),
    "q4_k_m": (15, False),
    "q1_0": (40, False),
    "tq2_0": (37, False),
    "mxfp4": (38, False),  # keeps experts in it, and quantizes the rest to Q8_0
}
TOWER = "mmproj"
PATTERN = "qwen2"  # of the small model's tokenizer, whose hash llama.cpp does not know


def find_converter(checkpoint: Path, tower: bool) -> Any:
    """llama.cpp's class for a checkpoint's text part, or for its tower."""
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    kind = ModelType.MMPROJ if tower else ModelType.TEXT
    architecture = get_model_architecture(ModelBase.load_hparams(checkpoint, False), kind)
    return get_model_class(architecture, mmproj=tower)


def write_f16(checkpoint: Path, path: Path) -> None:
    """Write matrices as float16, experts unchanged in MXFP4, and a byte-pair vocabulary."""
    import gguf

    converter = find_converter(checkpoint, tower=False)
    converter.no_mtp, converter.set_vocab = True, converter._set_vocab_gpt2
    converter.get_vocab_base_pre = lambda self, tokenizer: PATTERN
    converter(checkpoint, gguf.LlamaFileType.MOSTLY_F16, path).write()


def write_tower(checkpoint: Path, path: Path) -> None:
    """Write the vision tower; the converter chooses its types, since llama-quantize does not accept a tower."""
    import gguf

    find_converter(checkpoint, tower=True)(checkpoint, gguf.LlamaFileType.MOSTLY_Q8_0, path).write()


def quantize(source: Path, target: Path, scheme: str) -> None:
    """Quantize like ``llama-quantize``, with its choice of types per tensor unless the scheme is a pure one."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.pure = SCHEMES[scheme]
    parameters.nthread = len(os.sched_getaffinity(0))
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)) != 0:
        raise SystemExit(f"{source}: llama.cpp cannot quantize it to {scheme}")


def main() -> None:
    """Write PREFIX-SCHEME.gguf for each scheme of the command line, and PREFIX-mmproj.gguf if it is among them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="llama.cpp's folder, with convert_hf_to_gguf.py")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prefix", type=Path, help="files are called PREFIX-SCHEME.gguf")
    parser.add_argument("schemes", nargs="+", choices=[*SCHEMES, TOWER])
    args = parser.parse_args()
    sys.path[:0] = [str(args.sources), str(args.sources / "gguf-py")]
    if TOWER in args.schemes:
        write_tower(args.checkpoint, args.prefix.with_name(f"{args.prefix.name}-{TOWER}.gguf"))
    schemes = [scheme for scheme in args.schemes if scheme != TOWER]
    with tempfile.TemporaryDirectory(dir=args.prefix.parent) as scratch:
        plain = Path(scratch) / "f16.gguf"
        write_f16(args.checkpoint, plain)
        for scheme in schemes:
            quantize(plain, args.prefix.with_name(f"{args.prefix.name}-{scheme}.gguf"), scheme)


if __name__ == "__main__":
    main()
