"""Forms with files in bodies (RFC 7578), which lie in memory whole."""

from email.message import Message
from email.parser import BytesHeaderParser

from llmc.errors import printable
from llmc.runtime.server.http.errors import ApiError

MOST_FIELDS = 64
LONGEST_HEAD = 4096  # bytes of the headers of a field
_READER = BytesHeaderParser()


def parse_form(content: bytes, media_type: str) -> dict[str, list[bytes]]:
    """Values of the fields of a form by their names, without the brackets that some clients put behind those of lists.
    ``media_type``: the header content-type of the body.

    Raises:
        ApiError: 400, it is no such form, or has too many fields.
    """
    declared = Message()
    declared["content-type"] = media_type
    boundary = declared.get_boundary()
    if declared.get_content_type() != "multipart/form-data" or not boundary or not boundary.isascii():
        raise ApiError(400, "the body is no form; send multipart/form-data, with its boundary in the header")
    _, *parts = (b"\r\n" + content).split(b"\r\n--" + boundary.encode(), MOST_FIELDS + 2)
    if len(parts) > MOST_FIELDS + 1:
        raise ApiError(400, f"the form has more than {MOST_FIELDS} fields; send fewer")
    if not parts or not parts.pop().startswith(b"--"):
        raise ApiError(400, "the form breaks off; send all of it")
    found: dict[str, list[bytes]] = {}
    for part in parts:
        head, between, value = part.partition(b"\r\n\r\n")
        name = _read_name(head) if between and len(head) <= LONGEST_HEAD else None
        if name is None:
            raise ApiError(400, "a field of the form has no name; give it in content-disposition")
        found.setdefault(name.removesuffix("[]"), []).append(value)
    return found


def _read_name(head: bytes) -> str | None:
    name = _READER.parsebytes(head.lstrip()).get_param("name", header="content-disposition")
    return printable(name) if isinstance(name, str) and name else None
