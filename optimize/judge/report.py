"""The page of a bundle's quality: one HTML file without scripts, which a browser shows without any network."""

import hashlib
import platform
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from llmc import __version__
from llmc.bundle import Manifest
from llmc.errors import UsageError, printable
from llmc.optimize.judge.evaluate import Evaluation
from llmc.optimize.judge.gate import name_better
from llmc.optimize.judge.layers import LayerError
from llmc.optimize.plan.phases import plan_phases
from llmc.optimize.recipe import BuildRequest, find_recipe, settle
from llmc.optimize.targets import capabilities_for
from llmc.runtime.host.machine import cpu_model, usable_threads
from llmc.runtime.sessions import Phase

QUALITY_PAGE = "quality.html"  # its name in a bundle
HERE = Path(__file__).parent
# What each option of the gate's advice asks of a build.
OPTIONS: dict[str, dict[str, str]] = {
    **{f"--{precision}": {"precision": precision} for precision in ("int8", "fp16", "fp32")},
    **{f"--recipe {name}": {"recipe": name} for name in ("int4", "int4-quality", "int8-exact")},
    "--small": {"phases": "shared"},
}
_MARKS = str.maketrans({"\n": "↵", "\t": "⇥"})


@dataclass(frozen=True)
class Better:
    """An option of ``llmc build`` that loses less than the ones before it."""

    option: str
    bytes: int | None  # of the bundle on disk, by its plan; None if no plan is possible


def list_better(folder: Path, manifest: Manifest) -> tuple[Better, ...]:
    """The options that lose less than a bundle's recipe, one after the other, up to the one that rounds nothing.

    Sizes are those of builds that calibrate, for the same target and limits. ``folder`` has the tokenizer.
    """
    recipe, geometry, limits = manifest.recipe, manifest.geometry, manifest.limits
    target, better = capabilities_for(manifest.target.name, 0), dict[str, Better]()
    while (option := name_better(recipe, [*Phase])) not in better and option != f"--{recipe.precision}":
        wishes: dict[str, Any] = {**OPTIONS.get(option, {})}
        if not wishes:
            better[option] = Better(option, None)
            break
        request = BuildRequest(
            folder,
            **{**wishes, "recipe": find_recipe(wishes.get("recipe"))},
            target=target.name,
            decoder=_no_decoder,
            max_context=limits.max_context,
            max_batch=limits.max_batch,
        )
        try:
            plans = plan_phases(request, geometry, gpu_memory=0)
            recipe = settle(request.filled(), geometry, target)[0]
        except UsageError:  # the model cannot be combined with it
            break
        better[option] = Better(option, next(plan.writes for plan in plans if plan.phase == "build"))
    return tuple(better.values())


def _no_decoder(export: Path, device: str) -> None:
    """Stands for a decoder in a request that is only planned."""


def render(
    manifest: Manifest, evaluation: Evaluation, layers: Sequence[LayerError], better: Sequence[Better], command: str
) -> str:
    """The page as HTML. Each measured number stands in a ``data`` element whose ``value`` has all of its digits.

    Args:
        layers: with :attr:`LayerError.mean_kl`.
        command: the command line that measured; empty if there was none.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,  # texts, tokens and names are untrusted
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "token": _show_token, "kl": _show_kl, "size": _show_size}
    style = (HERE / "quality.css").read_text("utf-8")
    kls: dict[str, dict[str, float]] = {}
    for error in layers:
        kls.setdefault(error.name, {})[error.phase] = error.mean_kl or 0.0
    return environment.get_template("quality.html").render(
        # The page's policy lets a browser apply this style and nothing else.
        style=style,
        style_hash=b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        name=manifest.source.name,
        recipe=manifest.recipe,
        quality=evaluation.quality,
        losses=evaluation.losses,
        layers=kls,
        largest=max((kl for phases in kls.values() for kl in phases.values()), default=0.0),
        better=better,
        size=sum(entry.size for entry in manifest.files.values()),
        details=[*_describe(manifest, command)],
    )


def _describe(manifest: Manifest, command: str) -> Iterator[tuple[str, str]]:
    """Name what was measured, how and where, in rows."""
    source, target = manifest.source, manifest.target
    yield "model", f"{source.name}, {source.parameters:,} parameters, {source.dtype}"
    yield "fingerprint", source.fingerprint
    yield "target", f"{target.name}, {target.engine} {target.engine_version}"
    yield from ((name, str(value)) for name, value in _flatten("recipe", asdict(manifest.recipe)))
    yield from ((name, _show_size(entry.size)) for name, entry in manifest.files.items())
    yield "measured on", f"{cpu_model()}, {usable_threads()} threads, {platform.system()} {platform.machine()}"
    yield "llmc", f"{__version__}; the bundle was built by {manifest.llmc_version}"
    if command:
        yield "command", command


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings below ``name`` that are not off or empty."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{name} {key}", item)
    elif value:
        yield name.replace("_", " "), ", ".join(value) if isinstance(value, tuple | list) else value


def _show_token(text: str) -> str:
    """The text of tokens, with line ends and tabs as visible characters."""
    return printable(text.translate(_MARKS))


def _show_kl(kl: float) -> str:
    return f"{kl:.6f}" if kl >= 1e-6 else f"{kl:.1e}"


def _show_size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
