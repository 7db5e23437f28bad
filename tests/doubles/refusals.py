"""What tests ask of an error: its parts, for sentences may be written anew."""

from collections.abc import Callable

from llmc.errors import LlmcError


def about(parameter: str) -> Callable[[LlmcError], bool]:
    """The ``check`` of :func:`pytest.raises` for an error about this parameter."""

    def check(error: LlmcError) -> bool:
        assert error.parameter == parameter, f"{error.parameter}: {error}"
        return True

    return check
