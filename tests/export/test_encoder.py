"""Encoders: the exported graph computes what sentence-transformers does, and what llmc cannot compute is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import encoders

from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.config import DecoderConfig
from llmc.export.parts.attention import find_range
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.export.sources.made import MadeTensor, array_type
from llmc.export.sources.modules import IDENTITY

# Float32 adds in another order; vectors have length one.
TOLERANCE = 1e-4
TEXTS = (
    "def f(x):",
    "a",
    "",
    "import os\nfor name in os.listdir('.'):\n    print(name)",
    "class A: pass # " + "word " * 20,
)
CASES: dict[str, dict[str, Any]] = {
    "last token": {},
    # Its window is shorter than the texts.
    "mean, dense layers, a window": {
        "pooling": "mean",
        "dense": encoders.DENSE,
        "model_type": "mistral",
        "sliding_window": 6,
    },
    "both ways, two ropes, in windows": {"pooling": "mean", "dense": encoders.DENSE, **encoders.GEMMA},
    "bert": {"pooling": "cls_token", **encoders.BERT},
    "xlm-roberta": {"pooling": "cls_token", **encoders.XLM_ROBERTA},
    "modernbert": {"pooling": "cls_token", **encoders.MODERNBERT},
    "nomic_bert": {"pooling": "mean", **encoders.NOMIC_BERT},
    "mpnet": {"pooling": "mean", **encoders.MPNET},
    "bert, mean, float16": {"pooling": "mean", **encoders.BERT, "dtype": "float16", "hidden_act": "gelu"},
}
GEMMA = "both ways, two ropes, in windows"


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Checkpoint and export of a case, made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("encoder")
            checkpoint = encoders.write_embedder(folder / "checkpoint", **CASES[name])
            made[name] = checkpoint, export(checkpoint, folder / "export").output
        return made[name]

    return make


def tokens(checkpoint: Path) -> list[list[int]]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def padded(rows: list[list[int]]) -> dict[str, np.ndarray]:
    ids = np.full((len(rows), max(map(len, rows))), 7, np.int64)
    for row, text in zip(ids, rows, strict=True):
        row[: len(text)] = text
    return {"input_ids": ids, "lengths": np.array([len(text) for text in rows])}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_embeds_ragged_rows_as_sentence_transformers_does(name, exported, onnxruntime_run):
    checkpoint, folder = exported(name)
    (found,) = onnxruntime_run(folder)(padded(tokens(checkpoint)))
    assert np.abs(found - encoders.embeddings(checkpoint, TEXTS)).max() <= TOLERANCE


def test_texts_are_lowered_where_the_checkpoint_says_so(exported, tmp_path):
    import tokenizers

    checkpoint, _ = exported("last token")
    folder = encoders.copy(checkpoint, tmp_path / "lowering")
    encoders.write_json(folder / "sentence_xlnet_config.json", {"max_seq_length": 9, "do_lower_case": True})
    found = read_checkpoint(folder)
    lowering = tokenizers.Tokenizer.from_str(found.texts["tokenizer.json"])
    assert (
        lowering.encode("DEF F(X)").ids
        == tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json").encode("def f(x)").ids
    )
    assert found.config.max_positions == 9


def test_files_may_be_those_of_later_versions(exported, tmp_path):
    """Which keep the limit of texts in the tokenizer's config, and may write one kind of pooling as a list."""
    checkpoint, _ = exported("bert")
    folder = encoders.copy(checkpoint, tmp_path / "later")
    encoders.change_json(folder / "tokenizer_config.json", model_max_length=9)
    encoders.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": ["mean"], "embedding_dimension": 64})
    config = read_checkpoint(folder).config
    assert config.encoder is not None and (config.max_positions, config.encoder.pooling) == (9, "mean")
    encoders.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 12})
    assert read_checkpoint(folder).config.max_positions == 12


def test_an_encoder_without_modules_embeds_the_mean_with_a_note(exported, tmp_path):
    checkpoint, _ = exported("bert")
    folder = encoders.copy(checkpoint, tmp_path / "bare")
    (folder / "modules.json").unlink()
    found = read_checkpoint(folder)
    assert found.config.encoder is not None
    assert (found.config.encoder.pooling, found.config.encoder.normalized) == ("mean", False)
    assert any("the mean of all tokens" in note for note in found.notes)


def test_distances_share_biases_as_in_transformers():
    import torch
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distances = range(-520, 521)
    wanted = MPNetEncoder.relative_position_bucket(-torch.tensor(distances)).tolist()
    assert [find_range(distance) for distance in distances] == wanted


QUERY, DOCUMENTS = "where is f ?", ["def f(x): return x", "", "import os\nprint(os.listdir('.'))"]
RERANKERS: dict[str, dict[str, Any]] = {
    "bert": encoders.BERT,
    "roberta": encoders.ROBERTA,
    "modernbert": encoders.MODERNBERT,
}


@pytest.mark.parametrize("name", RERANKERS)
def test_a_graph_ranks_ragged_rows_as_sentence_transformers_does(name, tmp_path, onnxruntime_run):
    import tokenizers

    checkpoint = encoders.write_classifier(tmp_path / "checkpoint", **RERANKERS[name])
    if name == "roberta":  # logits, as versions before 4 said it
        encoders.change_json(checkpoint / "config.json", sbert_ce_default_activation_function=IDENTITY)
    if name == "modernbert":  # by the shorter name
        encoders.change_json(checkpoint / "config.json", sentence_transformers={"activation_fn": "torch.nn.Identity"})
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    pairs = [tokenizer.encode(QUERY, document) for document in DOCUMENTS]
    feeds = padded([pair.ids for pair in pairs])
    if name == "bert":
        feeds["token_types"] = np.minimum(padded([pair.type_ids for pair in pairs])["input_ids"], 1)
    (found,) = onnxruntime_run(export(checkpoint, tmp_path / "export").output)(feeds)
    assert np.abs(found - encoders.scores(checkpoint, QUERY, DOCUMENTS)).max() <= TOLERANCE


def eager(checkpoint: Path, change: Callable[[DecoderConfig], DecoderConfig] = lambda config: config) -> np.ndarray:
    """The torch module on the checkpoint's weights, with something changed."""
    import torch

    from llmc.export.encoder import Encoder

    found = read_checkpoint(checkpoint)

    def array(tensor: Any) -> np.ndarray:
        if isinstance(tensor, MadeTensor):
            return np.concatenate(list(tensor.pieces()))
        return np.memmap(checkpoint / tensor.file, array_type(tensor.dtype), "r", tensor.offset, tensor.shape)

    module = Encoder(change(found.config))
    parts = module.state_dict().keys()  # without what was dropped
    weights = {name: torch.tensor(array(tensor)) for name, tensor in found.tensors.items() if name in parts}
    module.load_state_dict(weights, assign=True)
    with torch.no_grad():
        return module(*map(torch.tensor, padded(tokens(checkpoint)).values()))[0].numpy()


def with_end(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, encoder=replace(config.encoder, **changes))


def with_attention(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(
        config, layers=tuple(replace(layer, attention=replace(layer.attention, **changes)) for layer in config.layers)
    )


def straight(config: DecoderConfig) -> DecoderConfig:
    """Without what bends the values of the last dense layer."""
    return with_end(dense=tuple(replace(layer, activation="identity") for layer in config.encoder.dense))(config)


@pytest.mark.parametrize("name", CASES)
def test_the_module_computes_what_its_graph_does(name, exported, onnxruntime_run):
    checkpoint, folder = exported(name)
    (graph,) = onnxruntime_run(folder)(padded(tokens(checkpoint)))
    assert np.abs(eager(checkpoint) - graph).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bert", with_end(pooling="mean")),
        ("bert", with_attention(causal=True)),
        ("bert", lambda config: replace(config, norm=replace(config.norm, eps=1e-12))),
        ("modernbert", with_attention(window=0)),
        ("modernbert", with_attention(rope=0)),
        ("mpnet", with_end(biased=False)),
        ("last token", with_end(pooling="mean")),
        ("last token", with_end(normalized=False)),
        ("last token", with_attention(causal=False)),
        ("mean, dense layers, a window", with_end(pooling="last")),
        ("mean, dense layers, a window", straight),
        ("mean, dense layers, a window", with_attention(window=0)),
        (GEMMA, with_attention(causal=True)),
        (GEMMA, with_attention(window=0)),
        (GEMMA, with_attention(rope=0)),
        (GEMMA, with_end(pooling="last")),
    ],
)
def test_a_behaviour_that_is_dropped_is_seen(name, change, exported):
    checkpoint, _ = exported(name)
    assert np.abs(eager(checkpoint, change) - eager(checkpoint)).max() > 10 * TOLERANCE


def spoilt(file: str, **changes: Any) -> Callable[[Path], None]:
    """Changes entries of a JSON object."""
    return lambda folder: encoders.change_json(folder / file, **changes)


def listing(*modules: dict[str, str]) -> Callable[[Path], None]:
    """Lists other modules."""
    return lambda folder: encoders.write_json(folder / "modules.json", list(modules))


def without(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


@pytest.mark.threat("encoder-modules")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoilt("1_Pooling/config.json", pooling_mode_cls_token=True), "pooling_mode=.* expected one of cls, last"),
        (spoilt("1_Pooling/config.json", pooling_mode="max"), "pooling_mode='max' is unsupported"),
        (spoilt("1_Pooling/config.json", include_prompt=False), "include_prompt=False is unsupported; expected true"),
        (spoilt("2_Dense/config.json", activation_function="torch.nn.ReLU"), "activation_function='torch.nn.ReLU'"),
        (spoilt("2_Dense/config.json", in_features=63), "a Dense layer reads 63 values, but 64 come before it"),
        (spoilt("sentence_bert_config.json", modality_config={"image": {}}), "modality_config=.* is unsupported"),
        (without("1_Pooling/config.json"), "no 1_Pooling/config.json, but modules.json"),
        (without("2_Dense/model.safetensors"), "no 2_Dense/model.safetensors"),
        (without("modules.json"), "there is no modules.json to define its vectors"),
        (
            lambda folder: encoders.write_modules(folder, ["Transformer", "LogitScore", "Pooling"]),
            "LogitScore, Pooling",
        ),
        (listing({"path": "", "type": "their.code.Model"}), "their.code.Model in '' is unsupported, since"),
        (listing({"path": "../..", "type": "x"}), "module 0 has no type and the name of a folder"),
    ],
)
def test_what_cannot_be_computed_is_refused(spoil, message, exported, tmp_path):
    checkpoint, _ = exported("mean, dense layers, a window")
    folder = encoders.copy(checkpoint, tmp_path / "spoilt")
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


@pytest.mark.threat("encoder-modules")
@pytest.mark.parametrize("name", ["position", "token_type"])
@pytest.mark.parametrize("rows", [0, 1, None])
def test_tables_of_another_size_are_refused(name, rows, exported, tmp_path):
    from safetensors.numpy import load_file, save_file

    checkpoint, _ = exported("bert")
    folder = encoders.copy(checkpoint, tmp_path / "spoilt")
    tensors, table = load_file(folder / "model.safetensors"), f"embeddings.{name}_embeddings.weight"
    tensors[table] = tensors[table][:rows] if rows is not None else tensors[table][0]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.embed_\w+.weight has shape .* but config.json asks for"):
        read_checkpoint(folder)
