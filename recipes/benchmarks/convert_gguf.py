"""Write a Hugging Face checkpoint as GGUF and let llama.cpp quantize it.

Needs llama-cpp-python, gguf, torch and safetensors: run it with the interpreter of the llama.cpp peer. Handles plain
decoders (llama, qwen2, qwen3) and refuses a tensor it does not know.
"""

import argparse
import ctypes
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors import safe_open

# llama_ftype, and whether all matrices get that type: llama.cpp keeps some, the tied head above all, in more bits.
SCHEMES = {"f16": (1, True), "q4_0": (2, False), "q4_0_pure": (2, True), "q8_0": (7, False), "q4_k_m": (15, False)}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NORMAL, CONTROL = 1, 3  # llama.cpp's types of tokens
TENSOR = re.compile(r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)")


def gguf_name(name: str) -> str:
    match = TENSOR.fullmatch(name)
    if match is None or match["module"] not in NAMES:
        raise SystemExit(f"tensor {name} is unknown; expected one of {', '.join(NAMES)}")
    block = f"blk.{match['layer']}." if match["layer"] else ""
    return f"{block}{NAMES[match['module']]}.{match['kind']}"


def tensors(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name).float().numpy()


def interleave(array: Any, heads: int) -> Any:
    """Reorder the rows of a llama projection from halves to pairs, the order in which llama.cpp rotates."""
    rows = array.shape[0] // heads // 2
    return array.reshape(heads, 2, rows, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_header(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(f"rope_type={rope['rope_type']!r} is unsupported; expected 'default'")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("benchmark")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def write_tokenizer(writer: Any, checkpoint: Path, size: int) -> None:
    """Write the vocabulary where it is one of byte pairs that fills the model's; else none: runners feed token ids."""
    content = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab", {})
    if content["model"]["type"] != "BPE" or sorted(vocabulary.values()) != list(range(size)):
        writer.add_tokenizer_model("no_vocab")
        return
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")  # the pattern of the small model's tokenizer, which is Qwen2's
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    )
    writer.add_eos_token_id(json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["eos_token_id"])
    writer.add_add_bos_token(False)
    template = checkpoint / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def write_f16(checkpoint: Path, path: Path) -> None:
    """Write matrices as float16, vectors as float32."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    architecture = config["model_type"]
    if architecture not in ARCHITECTURES:
        raise SystemExit(f"model_type={architecture!r} is unsupported; expected one of {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(str(path), architecture)
    write_header(writer, config)
    write_tokenizer(writer, checkpoint, config["vocab_size"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, array in tensors(checkpoint):
        new_name = gguf_name(name)
        module = new_name.split(".")[-2]
        if architecture == "llama" and module in heads:
            array = interleave(array, heads[module])
        writer.add_tensor(new_name, array.astype(np.float16 if array.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, scheme: str) -> None:
    """Quantize as ``llama-quantize`` does, with its own choice of types per tensor unless the scheme is a pure one."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.pure = SCHEMES[scheme]
    parameters.nthread = len(os.sched_getaffinity(0))
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)) != 0:
        raise SystemExit(f"{source}: llama.cpp cannot quantize it to {scheme}")


def main() -> None:
    """Write PREFIX-SCHEME.gguf for each scheme of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prefix", type=Path, help="files are called PREFIX-SCHEME.gguf")
    parser.add_argument("schemes", nargs="+", choices=SCHEMES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.prefix.parent) as scratch:
        plain = Path(scratch) / "f16.gguf"
        write_f16(args.checkpoint, plain)
        for scheme in args.schemes:
            quantize(plain, args.prefix.with_name(f"{args.prefix.name}-{scheme}.gguf"), scheme)


if __name__ == "__main__":
    main()
