"""Bundles as the options of a service load them: their manifests, what they need of memory, and their models."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from llmc.bundle import Manifest, publication, read_bundle
from llmc.bundle.model.kinds import allows
from llmc.errors import BundleError, RequestError, UsageError
from llmc.runtime.api.options import EngineOptions, row_limit
from llmc.runtime.generator import Generator
from llmc.runtime.loaded import LoadedBundle
from llmc.runtime.loading import MemoryNeed, load, memory_need
from llmc.runtime.server.config import ANY_TOKENS
from llmc.runtime.sessions.staged import plan_together, read_stages

log = logging.getLogger(__name__)

_DEFAULTS = {option.name: option.default for option in fields(EngineOptions)}
# Values that nobody misses where they are left out: the service's own, and one that asks for nothing.
_UNMISSED = {"draft": ("auto", "none"), "default_max_tokens": (ANY_TOKENS,)}


class Loader:
    """Reads and loads bundles, all with the same options of :func:`llmc.runtime.load`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self._manifests: dict[Path, tuple[tuple[int, ...] | None, Manifest]] = {}

    def read(self, folder: Path) -> Manifest:
        """The manifest in a folder, read again only if another one was published."""
        published = publication(folder)
        known = self._manifests.get(folder)
        if known is None or known[0] != published:
            manifest = read_bundle(folder)
            before = read_stages(folder, manifest) if self.options.get("stages") is None else {}
            known = self._manifests[folder] = (published, plan_together(manifest, before))
        return known[1]

    def need(self, folder: Path) -> MemoryNeed:
        manifest = self.read(folder)
        return memory_need(manifest, self.options_of(manifest))

    def options_of(self, manifest: Manifest) -> dict[str, Any]:
        """Arguments of ``load`` for a bundle: those of an engine only if it has one, which may keep no prefixes."""
        barred = [name for name in _DEFAULTS if not allows(manifest.geometry, name)]
        return {name: value for name, value in self.options.items() if name not in barred}

    def check_options(self, folder: Path) -> None:
        manifest = self.read(folder)
        options, most = self.options_of(manifest), manifest.limits.max_context
        context = options.get("max_context") or 1
        if context > most:
            raise UsageError(
                "max_context",
                f"is {context}, the bundle was built for {most}",
                "lower it, or build with a larger --max-context",
            )
        if allows(manifest.geometry, "max_batch"):
            row_limit(manifest, EngineOptions(**{k: v for k, v in options.items() if k in _DEFAULTS}))

    def load(
        self, folder: Path, memory: int | None, adapters: Mapping[str, Path], tool_format: str | None = None
    ) -> LoadedBundle:
        """Load a model with all that it reads of its folder, in which another bundle may be published later.

        Raises:
            BundleError: also for options that do not suit it: they are not its clients' fault.
            LlmcError: as :func:`llmc.runtime.load`.
        """
        manifest = self.read(folder)
        unused = self.options.keys() - self.options_of(manifest).keys()
        usual = {name: (_DEFAULTS[name], *_UNMISSED.get(name, ())) for name in unused}
        if given := sorted(name for name in unused if self.options[name] and self.options[name] not in usual[name]):
            log.warning("%s cannot use %s, and is loaded without", folder, " and ".join(given))
        try:
            options = self.options_of(manifest)
            if tool_format is not None and allows(manifest.geometry, "tool_format"):
                options["tool_format"] = tool_format
            model = load(folder, kind=LoadedBundle, memory=memory, adapters=adapters, **options)
        except (UsageError, RequestError) as error:  # the latter of a draft
            said = f"{error.parameter} {error.problem}".lstrip()
            raise BundleError(f"it cannot be loaded with the options of this service: {said}", path=folder) from error
        try:
            if isinstance(model, Generator):
                _ = model.engine  # a draft that does not fit is refused now
                with suppress(RequestError):  # it has no chat template; who chats will be told
                    _ = model.chat_template
        except BaseException:
            model.close()
            raise
        return model
