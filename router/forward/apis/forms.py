"""Forms with files (multipart/form-data): the names of their fields, and their short texts.

The engine reads the form itself; files are neither copied nor kept here.
"""

import msgspec
from msgspec import Raw
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.errors import InvalidFieldError

FORM = "multipart/form-data"

MOST_FIELDS = 64
MOST_BOUNDARY_BYTES = 256

MOST_TEXT_BYTES = 4096
"""The limit of a text that is read; a longer one, and a file, count as null."""

_NULL = Raw(b"null")
_ALLOWED = "a field of a form, each with a name"


class FormReader:
    """Collects the fields of one form, as JSON texts.

    Raises InvalidFieldError for a field without a name, for one that is given twice, since engines
    differ in which one they take, and for too many.
    """

    def __init__(self) -> None:
        self.fields: dict[str, Raw] = {}
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._text: bytearray | None = None
        self._name = ""

    def feed(self, body: bytes, boundary: bytes) -> None:
        """Read a whole form. Raises InvalidFieldError."""
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._take_header,
                "on_header_value": self._take_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_content,
                "on_part_data": self._take_content,
                "on_part_end": self._end,
            },
        )
        try:
            parser.write(body)
            parser.finalize()
        except FormParserError as error:
            raise InvalidFieldError("body", f"no form: {error}"[:200], FORM, status=422) from error

    def _begin(self) -> None:
        self._header = self._value = self._disposition = b""
        self._text = None

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.strip().lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if not name or len(name) > MOST_BOUNDARY_BYTES:
            raise InvalidFieldError("body", "a field without a name, or a long one", _ALLOWED)
        if name in self.fields and not name.endswith("[]"):
            raise InvalidFieldError(name, "given twice", "once")
        if len(self.fields) >= MOST_FIELDS:
            raise InvalidFieldError("body", "too many fields", f"at most {MOST_FIELDS}")
        self._name, self.fields[name] = name, _NULL
        self._text = None if b"filename" in options else bytearray()

    def _take_content(self, data: bytes, start: int, end: int) -> None:
        if self._text is None:
            return
        if len(self._text) + end - start > MOST_TEXT_BYTES:
            self._text = None
        else:
            self._text += data[start:end]

    def _end(self) -> None:
        if self._text is not None:
            text = self._text.decode("utf-8", "replace")
            self.fields[self._name] = Raw(msgspec.json.encode(text))


def form_fields(content_type: bytes, body: bytes) -> dict[str, Raw]:
    """Return the fields of a form. Raises InvalidFieldError. O(body)."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= MOST_BOUNDARY_BYTES:
        raise InvalidFieldError("content-type", "no boundary", f"{FORM}; boundary=…", status=422)
    reader = FormReader()
    reader.feed(body, boundary)
    return reader.fields
