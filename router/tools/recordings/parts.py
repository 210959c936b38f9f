"""The files of a recording, as one: the named part after those before it that are still there."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from router.observability.recorder import number_of, parts_of
from router.recording.format import (
    LINE_LIMIT_BYTES,
    Header,
    Line,
    RecordingError,
    decode_header,
    decode_lines,
    opening,
)


class OpenRecording:
    """A recording that is read, to be used as a context.

    `header`: that of the first part at hand; `paths`: all parts, in order. A part that is renamed
    meanwhile stays open.
    """

    def __init__(self, path: Path) -> None:
        """Open the part at this path, and those before it. Raises OSError, RecordingError."""
        self._open = ExitStack()
        try:
            file: BinaryIO = self._open.enter_context(path.open("rb"))
            self.header = decode_header(file.readline(LINE_LIMIT_BYTES))
            self._files: list[BinaryIO] = [file]
            self.paths = [path]
            self._add_parts_before(path)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._open.close()

    @property
    def size_bytes(self) -> int:
        """The size of all parts."""
        return sum(path.stat().st_size for path in self.paths)

    def lines(self) -> Iterator[tuple[int, Line]]:
        """Yield all lines, numbered as if the parts were one file. Raises RecordingError.

        Without its first part it begins with a hole, and the fleet at that time.
        """
        for line in opening(self.header):
            yield 1, line
        first = 2
        for path, file in zip(self.paths, self._files, strict=True):
            number = first - 1
            try:
                for number, line in decode_lines(_raw(file), first):
                    yield number, line
            except RecordingError as error:
                if len(self.paths) == 1:
                    raise
                detail = f"in {path.name}: {error.detail}"
                raise RecordingError(error.problem, error.line, detail) from error
            first = number + 2  # behind the header of the next part

    def _add_parts_before(self, path: Path) -> None:
        """Open the parts before this one, back to the first that is missing."""
        base = path.with_suffix("") if number_of(path) else path
        before: dict[int, tuple[Path, BinaryIO, Header]] = {}
        for each in parts_of(base) if self.header.part > 1 else ():
            file = self._open.enter_context(each.open("rb"))
            header = decode_header(file.readline(LINE_LIMIT_BYTES))
            if header.seed == self.header.seed and header.part < self.header.part:
                before[header.part] = (each, file, header)
        while (found := before.get(self.header.part - 1)) is not None:
            self.header = found[2]
            self.paths.insert(0, found[0])
            self._files.insert(0, found[1])


def _raw(file: BinaryIO) -> Iterable[bytes]:
    return iter(lambda: file.readline(LINE_LIMIT_BYTES), b"")
