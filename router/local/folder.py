"""Where a fleet keeps its things: a folder that no other fleet uses, for two buses would write into
one store.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router.errors import ConfigError
from router.process.own_folder import own_folder


@contextmanager
def fleet_folder(data_dir: str | None) -> Iterator[Path]:
    """A folder, made where there is none; without a name one that is gone afterwards. Raises
    ConfigError.
    """
    if data_dir is not None:
        with own_folder(Path(data_dir)):
            yield Path(data_dir)
        return
    try:
        temporary = tempfile.TemporaryDirectory(prefix="kv-router-", ignore_cleanup_errors=True)
    except OSError as error:
        problem = f"no temporary folder can be made: {error.strerror}"
        raise ConfigError("data_dir", problem, "a folder, as --data-dir FOLDER") from error
    with temporary as directory:
        yield Path(directory)
