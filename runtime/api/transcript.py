"""Transcripts of audio: what a model that hears writes, without the words around it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmc.errors import UsageError, format_value
from llmc.runtime.api.chat import ChatHandle, ChatResult
from llmc.runtime.api.handle import OutputCollector
from llmc.runtime.tools.parser import Parsed

# Names that Qwen3-ASR was trained with, by ISO 639 codes. Source: transformers, qwen3_asr.
_TABLE = """
    ar Arabic yue Cantonese zh Chinese cs Czech da Danish nl Dutch en English fil Filipino fi Finnish fr French
    de German el Greek hi Hindi hu Hungarian id Indonesian it Italian ja Japanese ko Korean mk Macedonian ms Malay
    fa Persian pl Polish pt Portuguese ro Romanian ru Russian es Spanish sv Swedish th Thai tr Turkish vi Vietnamese
"""
LANGUAGES = dict(zip(_TABLE.split()[::2], _TABLE.split()[1::2], strict=True))
_NAMES = {**LANGUAGES, **{name.lower(): name for name in LANGUAGES.values()}}
_PLACE = "{language}"
# Tokens of a transcript beyond one for each row of the audio, of which speech has a second's worth of 13: an answer of
# more goes round in circles.
SPARE_TOKENS = 256


def find_language(given: str | None) -> str | None:
    """The name of a language from its name or ISO 639 code. Raises UsageError: the model was not trained with it."""
    if given is None:
        return None
    name = _NAMES.get(given.lower()) if isinstance(given, str) else None
    if name is None:
        known = ", ".join(f"{code} ({name})" for code, name in LANGUAGES.items())
        raise UsageError("language", f"is {format_value(given)}, expected one of {known}")
    return name


def make_messages(audio: Any, prompt: str | None, beginning: str) -> list[dict[str, Any]]:
    """The conversation whose answer is a transcript; ``beginning`` is that of the answer, where it is known."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": prompt}] if prompt else []
    messages.append({"role": "user", "content": [{"type": "audio", "audio": audio}]})
    return [*messages, {"role": "assistant", "content": beginning}] if beginning else messages


@dataclass(frozen=True)
class Transcript:
    """A finished transcript."""

    text: str
    language: str | None  # the name of the language, as given or recognized; None: the model names none
    seconds: float  # length of the audio
    result: ChatResult  # with the model's raw text and the usage


class TranscriptParser:
    """Parser of an answer: its content is what follows ``opening``, with ``{language}`` in it, and blanks.

    Args:
        opened: True if the prompt ends with the opening.
    """

    def __init__(self, opening: str, opened: bool) -> None:
        self._end = opening.partition(_PLACE)[2]
        self._held, self._opened, self._began = "", opened, False

    def push(self, text: str) -> Parsed:
        self._held += text
        if not self._opened:
            _, found, rest = self._held.partition(self._end)
            if not found:
                return Parsed()
            self._held, self._opened = rest, True
        return self._take()

    def finish(self, cut: bool = False) -> Parsed:
        """The rest; an answer without the opening is a transcript as a whole."""
        self._opened = True
        return self._take()

    def _take(self) -> Parsed:
        """The certain part of the held text: blanks may be the last."""
        kept = self._held if self._began else self._held.lstrip()
        content = kept.rstrip()
        self._began, self._held = self._began or bool(content), kept[len(content) :]
        return Parsed(content)


class TranscriptHandle(ChatHandle):
    """A submitted transcription, whose pieces and results are :class:`llmc.runtime.api.chat.ChatHandle`'s; the content
    of the message is the transcript."""

    def __init__(
        self,
        collector: OutputCollector,
        cancel: Callable[[], None],
        outputs: int,
        keep: bool,
        opening: str,
        language: str | None,
        seconds: float,
    ) -> None:
        super().__init__(collector, cancel, outputs, keep, lambda _: TranscriptParser(opening, language is not None))
        self._opening, self._language, self.seconds = opening, language, seconds

    def transcript(self, result: ChatResult) -> Transcript:
        """The transcript in the complete answer."""
        language = self._language
        before, _, after = self._opening.partition(_PLACE)
        head, found, _ = result.outputs[0].text.partition(after)
        if language is None and found and head.strip().startswith(before):
            language = head.strip()[len(before) :].strip()
        return Transcript(result.text, None if language in ("", "None") else language, self.seconds, result)
