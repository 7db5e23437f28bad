"""One table says what goes with which kind of model; here every kind meets every feature."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from doubles.geometries import AUDIO, VISION, uniform
from doubles.refusals import about

from llmc.bundle import Budget, Geometry
from llmc.bundle.model.diffusion import Diffusion
from llmc.bundle.model.draft_head import DraftHead
from llmc.bundle.model.encoder import Encoder
from llmc.bundle.model.experts import Experts
from llmc.bundle.model.kinds import CLASHES, FEATURES, KINDS, allows, kinds_of, refuse
from llmc.bundle.model.linear import Codes
from llmc.bundle.model.recurrent import Recurrent
from llmc.errors import UsageError
from llmc.optimize.recipe import BuildRequest
from llmc.optimize.targets import capabilities
from llmc.runtime.api.options import EngineOptions

PLAIN = uniform("llama", 2, 64, 64, 4, 4, 16, 64, 64, False, (0, 0))
FIRST, LAST = PLAIN.attentions
SHARING = replace(PLAIN, attentions=(FIRST, replace(LAST, writes=False, cache=FIRST.cache)))
MODELS: dict[str, Geometry] = {
    "embeds or ranks texts": replace(
        PLAIN, encoder=Encoder(result="embeddings", pooling="last", width=64, normalized=True)
    ),
    "fills masks": replace(PLAIN, diffusion=Diffusion(3, 1)),
    "drafts for another model": replace(PLAIN, head=DraftHead(borders=(1,), width=64, own_width=64)),
    "reads the caches of another model": replace(SHARING, caches=tuple(replace(it, lent=True) for it in PLAIN.caches)),
    "has layers that read the caches of others": SHARING,
    "shares caches among its own layers": SHARING,
    "has experts": replace(PLAIN, mixtures=(Experts(name="experts", layer=0, count=4, chosen=2, inner=32, width=64),)),
    "has weights of 2 bits": replace(
        PLAIN, linears=tuple(replace(it, codes=Codes(2, 64, zero_points=False)) for it in PLAIN.linears)
    ),
    "sees images": replace(PLAIN, vision=VISION),
    "hears audio": replace(PLAIN, audio=AUDIO),
    "has recurrent layers": replace(
        PLAIN, recurrents=(Recurrent(name="conv", layer=0, rule="conv", taps=4, channels=64),)
    ),
    "has activations with learned scalars": replace(
        PLAIN, mlps=tuple(replace(it, activation="xielu") for it in PLAIN.mlps)
    ),
    "has latent attention": replace(PLAIN, attentions=(FIRST, replace(LAST, latent=24))),
    "has attention with sinks": replace(PLAIN, attentions=(FIRST, replace(LAST, sinks=True))),
    "scales its layers": replace(PLAIN, layer_scalars=True),
    "has inputs for each layer": replace(PLAIN, per_layer=8),
}
# Options and keys of a build, and the feature that each asks for.
ASKED: list[tuple[dict[str, Any], str]] = [
    ({"target": "cuda"}, "gpu"),
    ({"adapters": 1}, "adapters"),
    ({"budget": Budget(max_kl=0.1)}, "budget"),
    ({"sparsity": "2:4"}, "sparsity"),
    ({"pruning": "wanda"}, "pruning"),
    ({"scheme": "gptq"}, "scheme"),
    ({"activations": "none"}, "activations"),
    ({"smoothing": 0.5}, "smoothing"),
    ({"phases": "split"}, "phases"),
    ({"cache": "float32"}, "cache"),
    ({"cache": "float16"}, "float16 cache"),
    ({"cache": "int8-channel"}, "int8 cache"),
    ({"calibration": Path("text.txt")}, "calibration"),
    ({"samples": 2}, "samples"),
    ({"length": 2}, "length"),
    ({"draft_head": Path("head")}, "draft_head"),
    ({"stages": (0, 0)}, "stages"),
    ({"text": Path("text.txt")}, "text"),
]


def test_a_kind_holds_of_its_model_alone():
    assert [kind.words for kind in KINDS] == [*MODELS]
    assert kinds_of(PLAIN) == []
    assert all(kind in kinds_of(MODELS[kind.words]) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.words)
def test_a_feature_is_refused_for_every_model_of_a_kind_that_bars_it(kind):
    geometry = MODELS[kind.words]
    allowed = [name for name in FEATURES if allows(geometry, name)]
    assert not {*allowed} & {*kind.bars}
    refuse(geometry, *(name for name in allowed if name not in CLASHES))
    for feature in FEATURES.keys() - allowed:
        refuse(PLAIN, feature)
        with pytest.raises(UsageError, check=about(FEATURES[feature].parameter or feature)) as refused:
            refuse(geometry, "threads", feature)
        assert FEATURES[feature].words in refused.value.problem
        assert any(barring.words in refused.value.problem for barring in kinds_of(geometry))


@pytest.mark.parametrize(("one", "other"), [(one, other) for one, others in CLASHES.items() for other in others])
def test_features_that_exclude_each_other_are_refused_together(one, other):
    refuse(PLAIN, one)
    with pytest.raises(UsageError, check=about(one)) as refused:
        refuse(PLAIN, other, one)
    assert FEATURES[other].words in refused.value.problem


@pytest.mark.parametrize(("asked", "feature"), ASKED, ids=lambda value: str(value))
def test_a_build_asks_for_the_features_of_its_options(asked, feature):
    request = BuildRequest(Path("export"), **asked)
    assert feature in request.features(capabilities(request.target))
    rounded = BuildRequest(Path("export"), scheme="rtn", smoothing=0.0, phases="shared", adapters=0, budget=Budget())
    assert rounded.features(capabilities("cpu")) == []


def test_a_model_that_embeds_takes_no_option_of_an_engine():
    assert not any(allows(MODELS["embeds or ranks texts"], option.name) for option in fields(EngineOptions))
