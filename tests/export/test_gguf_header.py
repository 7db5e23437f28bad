"""Headers of GGUF files that are truncated, hostile or not known: one sentence, in no time and no memory."""

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from doubles.ggufs import load, write_gguf

from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.sources.gguf.header import MOST_ENTRIES, MOST_ITEMS, read_header
from llmc.exported import read_weights, rows_of

HUGE = 1 << 62


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def header(
    *parts: bytes, tensors: int = 0, entries: int = 0, version: int = 3, magic: bytes = b"GGUF", data: int = 64
) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts) + bytes(data)


ALIGNMENT = entry("general.alignment", 4, struct.pack("<I", 48))
CASES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is truncated or corrupt: its header goes on beyond 0"),
    "another format": (header(magic=b"PK\3\4"), r"is not a GGUF file (it begins with b'PK\x03\x04')"),
    "version 1": (header(version=1), "version 1; expected GGUF version 2 or 3"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "tensors without end": (header(tensors=HUGE), f"it counts {HUGE} tensors, expected at most {MOST_ENTRIES}"),
    "metadata without end": (header(entries=HUGE), f"it counts {HUGE} metadata, expected at most {MOST_ENTRIES}"),
    "a text without end": (header(struct.pack("<Q", HUGE), entries=1), "its header goes on beyond"),
    "a key of a thousand letters": (header(entry("k" * 1000, 7, b"\1"), entries=1), "a key of 1000 characters"),
    "a key of two lines": (header(entry("k\nllmc: fine", 7, b"\1"), entries=1), r"'k\nllmc: fine' is a key with char"),
    "a tensor's name of two lines": (header(tensor("a\x1b[2J"), tensors=1), "is a tensor's name with characters that"),
    "no UTF-8": (header(entry("k", 8, text(b"\xff")), entries=1), "is not UTF-8"),
    "a key twice": (header(entry("k", 7, b"\1"), entry("k", 7, b"\0"), entries=2), "k is there twice"),
    "a type that is none": (header(entry("k", 13, b"\1"), entries=1), "k is of type 13"),
    "an array of arrays": (header(entry("k", 9, struct.pack("<IQ", 9, 1)), entries=1), "an array of type 9"),
    "an array without end": (
        header(entry("k", 9, struct.pack("<IQ", 0, HUGE)), entries=1),
        f"it counts {HUGE} items of k, expected at most {MOST_ITEMS}",
    ),
    "an array longer than the file": (
        header(entry("k", 9, struct.pack("<IQ", 8, MOST_ITEMS)), entries=1),
        "its header goes on beyond",
    ),
    "no dimensions": (header(tensor(shape=()), tensors=1), "a has 0 dimensions, expected 1 to 4"),
    "dimensions without end": (header(text("a"), struct.pack("<I", HUGE >> 32), tensors=1), "dimensions, expected 1"),
    "a size of nothing": (header(tensor(shape=(0,)), tensors=1), "has shape [0]"),
    "a size without end": (header(tensor(shape=(1 << 50,)), tensors=1), "expected sizes above 0"),
    "more bytes than the file has": (header(tensor(shape=(1 << 20, 1 << 20)), tensors=1), "is truncated: a ends at"),
    "half a block": (header(tensor(shape=(4, 33), kind=2), tensors=1), "rows of whole Q4_0 blocks"),
    "a type that is not read": (
        header(tensor(kind=18), tensors=1),
        "tensor a is of type IQ3_XXS, expected one of F32,",
    ),
    "a type that nobody knows": (header(tensor(kind=99), tensors=1), "tensor a is of type number 99"),
    "a tensor twice": (header(tensor(), tensor(offset=32), tensors=2), "two of its tensors have one name"),
    "tensors over one another": (header(tensor(), tensor("b"), tensors=2), "b is at 0 of the data, expected 32"),
    "a gap": (header(tensor(), tensor("b", offset=64), tensors=2), "b is at 64 of the data, expected 32"),
    "an odd alignment": (header(ALIGNMENT, entries=1), "general.alignment=48 is unsupported"),
}


@pytest.mark.threat("gguf-header")
@pytest.mark.parametrize("name", CASES)
def test_a_header_that_cannot_be_right_is_refused_at_once(name, tmp_path):
    data, words = CASES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    start = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert memory < 1 << 20 and time.perf_counter() - start < 5


@pytest.mark.threat("gguf-header")
def test_the_number_of_items_of_all_arrays_has_a_bound(tmp_path):
    size = MOST_ITEMS // 2 + 1
    array = struct.pack("<IQ", 0, size) + bytes(size)
    (tmp_path / "model.gguf").write_bytes(header(entry("a", 9, array), entry("b", 9, array), entries=2))
    with pytest.raises(CheckpointError, match=f"its arrays hold more than {MOST_ITEMS} items"):
        read_header(tmp_path / "model.gguf")


@pytest.fixture(scope="module")
def folder(random_checkpoint) -> Path:
    return random_checkpoint("llama-llama3-rope-tied")


def refuses(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_named(folder, tmp_path, share):
    path = write_gguf(folder, tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    refuses(path, "model.gguf is truncated", "download it again")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"block_count": None}, ["num_hidden_layers is missing"]),
        ({"block_count": 3}, ["tensor model.layers.2.", "is missing"]),
        ({"embedding_length": HUGE >> 32}, ["hidden_size="]),
        ({"attention.head_count": "four"}, ["num_attention_heads='four'"]),
        ({"attention.head_count": [4, 2]}, ["llama.attention.head_count is a list of 2 values", "the same for all"]),
        ({"attention.head_count": 0}, ["num_attention_heads=0"]),
        ({"vocab_size": 95}, ["llama.vocab_size is 95", "the 96 rows of the embedding"]),
        ({"rope.dimension_count": 8}, ["llama.rope.dimension_count is 8", "the width of a head, 16"]),
        ({"attention.value_length": 8}, ["llama.attention.value_length is 8"]),
        ({"expert_used_count": 8}, ["llama.expert_used_count is 8", "expected 0"]),
        ({"expert_used_count": [0, 8]}, ["llama.expert_used_count is array([0, 8]", "expected 0"]),
        ({"general.type": "adapter"}, ["is an adapter, not a whole model"]),
        ({"split.count": [1, 2]}, ["says that it is one of array([1, 2]", "expected a name such as"]),
        ({"attention.brand_new": 1.5}, ["llama.attention.brand_new=1.5 is not known to llmc"]),
        ({"rope.freq_base": 10_000.0}, ["rope_freqs.weight do not follow Llama 3's rule"]),
    ],
)
def test_metadata_that_cannot_be_right_are_named(folder, tmp_path, metadata, words):
    refuses(write_gguf(folder, tmp_path / "model.gguf", metadata=metadata), *words)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ssm.state_size", 24, ["recurrent.in_proj.weight", "asks for [224, 64]"]),
        ("ssm.group_count", 3, ["linear_num_value_heads=4", "a multiple of linear_num_key_heads=3"]),
        ("ssm.inner_size", None, ["qwen35.ssm.inner_size is None", "a number above 0"]),
        ("nextn_predict_layers", 2, ["num_hidden_layers=0"]),
        ("attention.recurrent_layers", [True, False, False], ["layer_types=", "2 entries"]),
    ],
)
def test_sizes_of_recurrent_layers_that_cannot_be_right_are_named(random_checkpoint, tmp_path, key, value, words):
    folder = random_checkpoint("qwen3_5-delta-and-gates", linear_key_head_dim=32, linear_value_head_dim=32)
    refuses(write_gguf(folder, tmp_path / "model.gguf", metadata={key: value}), *words)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("feed_forward_length", [96] * 5 + [288], ["[96, 96, 96, 96, 96, 288]", "doubled in the last 3 layers"]),
        ("feed_forward_length", [96.5] * 6, ["a number for each of the 6 layers"]),
        ("attention.value_length_swa", 8, ["gemma4.attention.value_length_swa is 8", "the width of a head, 16"]),
        ("attention.sliding_window_pattern", [True, False], ["layer_types=", "6"]),
        ("attention.shared_kv_layers", 5, ["in the last 5 layers"]),
        ("expert_count", 128, ["moe_intermediate_size=None", "expected a whole number"]),
    ],
)
def test_layers_of_gemma4_that_cannot_be_right_are_named(random_checkpoint, tmp_path, key, value, words):
    folder = random_checkpoint("gemma4-shared-caches-per-layer-inputs", dtype="float32")
    refuses(write_gguf(folder, tmp_path / "model.gguf", metadata={key: value}), *words)


@pytest.mark.parametrize("kind", ["longrope", "brand-new"])
def test_a_rope_that_llama_has_not_is_refused(random_checkpoint, tmp_path, kind):
    path = write_gguf(random_checkpoint("llama-biases"), tmp_path / "model.gguf", metadata={"rope.scaling.type": kind})
    refuses(path, f"llama.rope.scaling.type is '{kind}'", "expected none, linear or yarn")


@pytest.mark.threat("gguf-header")
def test_blocks_of_no_numbers_are_named(random_checkpoint, tmp_path):
    """A scale that is NaN would make every weight of its block one."""
    path = write_gguf(random_checkpoint("llama-biases", intermediate_size=96), tmp_path / "model.gguf", "Q5_0")
    place = next(item for item in read_header(path).tensors if item.name == "blk.1.ffn_up.weight").offset
    data = bytearray(path.read_bytes())
    data[place : place + 2] = np.float16("nan").tobytes()
    path.write_bytes(data)
    weight = read_weights(export(path, tmp_path / "export").output)["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model.gguf: .*\.1\.mlp\.up_proj\.weight holds NaN or infinite weights"):
        rows_of(weight)


def test_a_model_in_several_files_is_read_together(folder, tmp_path):
    first = write_gguf(folder, tmp_path / "model.gguf", parts=3)
    whole = read_checkpoint(write_gguf(folder, tmp_path / "whole.gguf"))
    found = read_checkpoint(first)
    assert [path.name for path in found.files] == [f"model-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert (found.config, found.tensors.keys()) == (whole.config, whole.tensors.keys())
    assert len(load(folder)) == len(found.tensors)


@pytest.mark.threat("gguf-header")
def test_a_part_that_is_missing_or_not_the_first_is_named(folder, tmp_path):
    first = write_gguf(folder, tmp_path / "model.gguf", parts=3)
    second, third = (first.with_name(f"model-0000{part}-of-00003.gguf") for part in (2, 3))
    refuses(second, "is part 2 of 3; export the first one: model-00001-of-00003.gguf")
    third.write_bytes(second.read_bytes())
    refuses(first, "model-00003-of-00003.gguf is not part 3 of 3, as its name says")
    third.unlink()
    refuses(first, "model-00003-of-00003.gguf is missing, a part of model-00001-of-00003.gguf")
    first.rename(tmp_path / "renamed.gguf")
    refuses(
        tmp_path / "renamed.gguf", "says that it is one of 3 files; expected a name such as model-00001-of-00003.gguf"
    )


@pytest.mark.threat("gguf-header")
def test_a_tensor_in_two_parts_is_refused(folder, tmp_path):
    first = write_gguf(folder, tmp_path / "model.gguf", parts=3)
    second = first.with_name("model-00002-of-00003.gguf")
    data = second.read_bytes()
    name, other = next(
        (a.name, b.name)
        for a in read_header(second).tensors
        for b in read_header(first).tensors
        if len(a.name) == len(b.name)
    )
    second.write_bytes(data.replace(name.encode(), other.encode()))
    refuses(first, f"{other} is in another file, too")
