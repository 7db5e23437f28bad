"""Every error llmc raises on purpose.

::

    LlmcError                exit code 1; the message is meant for the user
    |-- UsageError           exit code 2: an argument is out of range or contradicts another
    |-- CheckpointError      the checkpoint (or an export of it) is broken or unsupported
    |-- BuildError           the compiler cannot do what the recipe asks
    |-- BundleError          a bundle is missing, corrupt, from another version or for another machine
    |-- RequestError         one request cannot be served; the model goes on
    |   |-- CancelledError        its client cancelled it
    |   |-- DeadlineError        its deadline passed
    |   |-- QueueFullError       the queue is full
    |   |-- EngineClosedError    the engine was closed before the request ended
    |   |-- ContextError        prompt and answer are longer than the context
    |   |-- ProcessorError       a function of the request raised, or returned an invalid result
    |   |-- GrammarError         its grammar cannot be compiled, or allows no token
    |   |-- NonFiniteError       the model computed NaN or infinite values for it
    |   `-- DraftError           a drafter has another tokenizer or reads other states
    |-- HubError             the Hugging Face hub does not answer, or does not give the model
    |-- ResourceError        there is not enough memory or disk
    |-- GpuError             GPU, driver or engine library are missing, unsupported or were lost
    `-- MissingExtraError    an optional dependency is not installed

An error carries its parts: the problem (what was found and expected), the advice, the parameter and the path. The
command line and the service put their own names of parameters and paths into the sentence. Errors of other libraries
are translated where they enter, with ``raise ... from``; an ``assert`` marks a bug of our own.
"""

import importlib
import reprlib
import shlex
from pathlib import Path
from types import ModuleType

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
DISTRIBUTION = "llmc-deploy"  # the name for pip; llmc is another project there


def printable(text: str) -> str:
    """``text`` with invisible and control characters escaped, except line ends and tabs.

    Names of files and tensors, and messages of templates, are untrusted: an escape sequence in them would clear a
    terminal or forge its lines, and an unpaired surrogate cannot be written as UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class LlmcError(Exception):
    """Base of all errors of llmc.

    Attributes:
        problem: what was found, and what was expected, without the path.
        advice: what to do, or empty.
        parameter: the parameter at fault, such as ``messages[0].content``, or empty.
        path: the file or folder at fault, or None.
    """

    exit_code = 1
    names_parameter = False  # True if the sentence begins with the parameter

    def __init__(self, problem: str = "", advice: str = "", *, parameter: str = "", path: Path | None = None) -> None:
        self.problem = problem
        self.advice = advice
        self.parameter = parameter
        self.path = path

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self, parameter: str | None = None) -> str:
        """The :func:`printable` message, with the caller's name for the parameter."""
        subject = self.parameter if parameter is None else parameter
        text = f"{subject} {self.problem}" if self.names_parameter else self.problem
        text = f"{text}; {self.advice}" if self.advice else text
        return printable(f"{self.path}: {text}" if self.path else text)


class UsageError(LlmcError):
    """A parameter is out of its range or contradicts another one.

    Args:
        parameter: its name, which begins the sentence.
        problem: what was found and what was expected, as ``is 2, expected 0 ... 1``.
        advice: what to do.
        path: the file that has the parameter as a key; None for an argument.
    """

    exit_code = 2
    names_parameter = True

    def __init__(self, parameter: str, problem: str, advice: str = "", *, path: Path | None = None) -> None:
        super().__init__(problem, advice, parameter=parameter, path=path)


class CheckpointError(LlmcError):
    """A checkpoint or an exported folder is broken, incomplete or not supported."""


class BuildError(LlmcError):
    """The compiler cannot do what the recipe asks for this model and target."""


class BundleError(LlmcError):
    """A bundle is missing, corrupt, written by another version or made for another machine."""


class RequestError(LlmcError):
    """A single request cannot be served as asked; the model stays usable."""


class CancelledError(RequestError):
    """The client cancelled the request."""


class DeadlineError(RequestError):
    """The request's deadline passed before it ended."""


class QueueFullError(RequestError):
    """The queue is full; try again later."""


class EngineClosedError(RequestError):
    """The engine was closed before the request ended."""


class ContextError(RequestError):
    """The prompt and the requested tokens are longer than the context."""


class ProcessorError(RequestError):
    """A function that came with the request raised an error, or returned something other than logits."""


class GrammarError(RequestError):
    """A grammar cannot be compiled, or leaves no token to choose; ``parameter`` names its argument."""

    names_parameter = True

    def __init__(self, parameter: str, problem: str, advice: str = "") -> None:
        super().__init__(problem, advice, parameter=parameter)


class NonFiniteError(RequestError):
    """The model computed NaN or infinite values: a fault of the bundle or the machine, not of the request."""


class DraftError(RequestError):
    """A drafter has another tokenizer than the model, or reads hidden states that the bundle does not output."""


class HubError(LlmcError):
    """The Hugging Face hub does not answer, or does not give the model."""


class ResourceError(LlmcError):
    """The machine has not enough memory or disk."""


class GpuError(LlmcError):
    """A GPU, its driver or its engine library is missing, too old, unsupported or failed.

    ``lost`` is True if the GPU's context is lost: this process cannot use it any more.
    """

    def __init__(self, problem: str, advice: str = "", *, path: Path | None = None, lost: bool = False) -> None:
        super().__init__(problem, advice, path=path)
        self.lost = lost


class MissingExtraError(LlmcError):
    """An optional dependency is needed and not installed."""


def text_of(error: BaseException) -> str:
    """``Type: message`` of an error that is not llmc's own; only its type if it has no message or ``str`` fails."""
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001 - a foreign __str__ may raise anything
        return name
    return f"{name}: {message}" if message else name


class _Short(reprlib.Repr):
    """Short representations for messages: a client may send a hundred megabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxtuple = self.maxlist = self.maxdict = 8

    def repr_tuple(self, value: tuple[object, ...], level: int) -> str:
        """A tuple as a list: clients of the service write JSON."""
        return self.repr_list([*value], level)

    def repr_int(self, value: int, level: int) -> str:
        """A long integer by its number of digits; Python refuses to write more than 4,300."""
        digits = int(value.bit_length() * 0.30103) + 1
        return repr(value) if digits <= 40 else f"an integer of about {digits} digits"

    def repr_instance(self, value: object, level: int) -> str:
        """Any other object; its repr may raise."""
        text = repr(value)
        return text if len(text) <= self.maxother else f"{text[: self.maxother]}..."


_SHORT = _Short()
_LONGEST = 300  # characters: nested lists multiply the limits of their items


def format_value(value: object) -> str:
    """A value for an error message, in at most a few hundred characters."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # noqa: BLE001 - a foreign __repr__ may raise anything
        return type(value).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def format_name(name: str) -> str:
    """An untrusted name for an error message; quoted if it is long or not printable."""
    return name if len(name) <= 80 and name.isprintable() else format_value(name)


def install_command(extra: str) -> str:
    """The pip command that installs the packages of an extra of llmc.

    It names the packages themselves, so it works without a checkout. torch comes from an index of CPU builds, since the
    default one brings gigabytes of CUDA packages.
    """
    wanted = _requirements(extra)
    index = [f"--extra-index-url {TORCH_INDEX}"] if any(name.startswith("torch") for name in wanted) else []
    return " ".join(["pip install", *index, *(shlex.quote(requirement) for requirement in wanted)])


def _requirements(extra: str) -> list[str]:
    from importlib import metadata  # slow to import, and rarely needed

    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # llmc runs from a folder and is not installed
        return [f"{Path(__file__).resolve().parent}[{extra}]"]
    requirements: list[str] = []
    for line in declared:
        requirement, _, marker = line.partition("; ")
        if marker.endswith(f'extra == "{extra}"'):
            nested = requirement.removeprefix(f"{DISTRIBUTION}[")
            if nested == requirement:
                condition, both, _ = marker.rpartition(" and ")
                requirements.append(f"{requirement}; {condition}" if both else requirement)
            else:
                requirements += [each for name in nested.removesuffix("]").split(",") for each in _requirements(name)]
    return requirements


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or name the extra that installs it.
    Raises MissingExtraError: the module is not installed, or only an empty folder of it is left."""
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # one of its own imports is missing
            raise
        raise MissingExtraError(f"{module} is not installed; {_where(extra)}") from error
    if getattr(imported, "__file__", None) is None and hasattr(imported, "__path__"):  # a namespace package
        left = ", ".join(imported.__path__)
        raise MissingExtraError(
            f"{module} is not installed, only the folder {left} is there: remove it; {_where(extra)}"
        )
    return imported


def _where(extra: str) -> str:
    return f"it is in the extra '{extra}': {install_command(extra)}"
