"""The tokenizers by model, as in the setting: `PATH`, or `MODEL=PATH,MODEL=PATH`."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from router.errors import ConfigError
from router.forward.tokenizer.errors import TokenizerFilesError
from router.forward.tokenizer.files import TokenizerFiles, read_files
from router.forward.tokenizer.token_cache import TokenCache

if TYPE_CHECKING:
    from router.forward.tokenizer.local import LocalTokenizer

Counted = Callable[[int, int], None]
"""A function called for each prompt with the numbers of cached and new tokens."""

ALLOWED = "a folder with tokenizer.json, or such a file; of several models MODEL=PATH,MODEL=PATH"


class Tokenizers:
    """Tokenizers by model; "" is the one of all other models. They share the cache `known`."""

    __slots__ = ("_by_model", "known")

    def __init__(self, by_model: "dict[str, LocalTokenizer]", known: TokenCache) -> None:
        self._by_model = by_model
        self.known = known

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return bool(self._by_model)

    def of(self, model: str) -> "LocalTokenizer | None":
        """Return the tokenizer of a model, or None."""
        return self._by_model.get(model) or self._by_model.get("")


def load_tokenizers(setting: str, most_tokens: int, counted: Counted) -> Tokenizers:
    """Load the tokenizers of the setting; each path is read once. Raises ConfigError."""
    known = TokenCache(most_tokens)
    by_path: dict[str, LocalTokenizer] = {}
    by_model: dict[str, LocalTokenizer] = {}
    for model, path in _named(setting):
        if model in by_model:
            of = f"model {model!r}" if model else "all other models"
            raise ConfigError("tokenizer", f"two for {of}", ALLOWED)
        if path not in by_path:
            by_path[path] = _loaded(read_files(path), known, counted)
        by_model[model] = by_path[path]
    return Tokenizers(by_model, known)


def _loaded(files: TokenizerFiles, known: TokenCache, counted: Counted) -> "LocalTokenizer":
    """Create a tokenizer; imports optional packages."""
    try:
        from router.forward.tokenizer.local import LocalTokenizer
    except ImportError as error:
        reason = f"the package {error.name!r} is missing"
        raise TokenizerFilesError(files.path, reason, "pip install 'kv-router[forward]'") from error
    return LocalTokenizer(files, known, counted)


def _named(setting: str) -> Iterator[tuple[str, str]]:
    for each in setting.split(",") if setting else ():
        model, equals, path = each.strip().rpartition("=")
        if not path or (equals and not model):
            raise ConfigError("tokenizer", repr(setting), ALLOWED)
        yield model, path
