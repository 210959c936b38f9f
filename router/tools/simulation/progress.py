"""A bar on the terminal while something runs."""

from typing import TextIO

WIDTH = 30


class ProgressBar:
    """Drawn over itself; on a stream that is no terminal, nothing is."""

    __slots__ = ("_drawn", "_is_shown", "_name", "_stream")

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._is_shown = stream.isatty()
        self._drawn = ""

    def show(self, fraction: float) -> None:
        """So much is done, of 1."""
        filled = round(min(fraction, 1.0) * WIDTH)
        bar = "█" * filled + "░" * (WIDTH - filled)
        self._draw(f"{bar} {fraction:4.0%} {self._name}")

    def clear(self) -> None:
        """Nothing runs any more."""
        self._draw("")

    def _draw(self, text: str) -> None:
        if self._is_shown and text != self._drawn:
            self._stream.write("\r" + text.ljust(len(self._drawn)) + "\r" * (not text))
            self._stream.flush()
            self._drawn = text
