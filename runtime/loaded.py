"""A loaded bundle, whatever its model does: its folder, manifest, tokenizer and session, and how it is closed."""

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from llmc.bundle import Manifest, publication, read_same
from llmc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc.runtime.text.chat_template import ChatTemplate

_B = TypeVar("_B", bound="LoadedBundle")


class LoadedBundle:
    """A loaded bundle: a :class:`llmc.runtime.Generator` or an :class:`llmc.runtime.Embedder`. Any thread may call it.
    Close it, or use it as a context manager.

    Args:
        folder, manifest, tokenizer: of the bundle.
        session: its graphs, loaded; closed with it.
        threads: that the session computes with.
        max_context: tokens of the longest sequence.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, tokenizer: Tokenizer, session: Any, threads: int, max_context: int
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.threads = threads
        self.max_context = max_context
        self._session = session
        self._publication = publication(folder)

    @property
    def engine_version(self) -> str:
        return str(self._session.engine_version)

    @property
    def processor(self) -> str:
        """Name of the CPU or GPU."""
        return str(self._session.processor)

    @property
    def planned_bytes(self) -> int:
        """Bytes that the process needs for it now, by the bundle's plan."""
        return self.manifest.memory.total(self.max_context)

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """The bundle's chat template.

        Raises:
            RequestError: it has none.
            BundleError: another bundle was published in its folder.
        """
        from llmc.runtime.text.chat_template import ChatTemplate  # jinja takes a while to import

        return read_same(self.folder, self._publication, partial(ChatTemplate.from_folder, tokenizer=self.tokenizer))

    def metric_families(self, labels: Mapping[str, str]) -> Iterator[Any]:
        """Metrics as families of prometheus-client, with ``labels`` on every sample; none without an engine."""
        return iter(())

    def close(self, drain: bool = False) -> None:
        """Free the session and its memory; requests that run fail, or with ``drain`` are finished first."""
        self._session.close()

    def __enter__(self: _B) -> _B:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
