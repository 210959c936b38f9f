import tempfile

import pytest

from router.errors import ConfigError
from router.tools.up.fleet import fleet_folder


def test_unnamed_folder_is_removed():
    with fleet_folder(None) as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()


def test_named_folder_stays(tmp_path):
    for _ in range(2):
        with fleet_folder(str(tmp_path / "a" / "b")) as folder:
            (folder / "file").write_text("x")
    assert (tmp_path / "a" / "b" / "file").exists()


def test_folder_is_used_by_one_fleet(tmp_path):
    with (
        fleet_folder(str(tmp_path)),
        pytest.raises(ConfigError, match="is in use") as refused,
        fleet_folder(str(tmp_path)),
    ):
        pass
    assert refused.value.key == "data_dir"


def test_folder_must_be_writable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can be written"), fleet_folder(f"{tmp_path}/file/x"):
        pass


def test_temporary_folder_must_be_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="--data-dir") as refused, fleet_folder(None):
        pass
    assert refused.value.key == "data_dir"
