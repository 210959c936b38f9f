import tempfile

import pytest

from router.errors import ConfigError
from router.local.folder import fleet_folder


def test_without_a_name_it_is_gone_afterwards():
    with fleet_folder(None) as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()


def test_a_named_one_stays(tmp_path):
    for _ in range(2):
        with fleet_folder(str(tmp_path / "a" / "b")) as folder:
            (folder / "file").write_text("x")
    assert (tmp_path / "a" / "b" / "file").exists()


def test_one_fleet_uses_it(tmp_path):
    with (
        fleet_folder(str(tmp_path)),
        pytest.raises(ConfigError, match="is in use") as refused,
        fleet_folder(str(tmp_path)),
    ):
        pass
    assert refused.value.key == "data_dir"


def test_it_has_to_be_writable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can be written"), fleet_folder(f"{tmp_path}/file/x"):
        pass


def test_so_has_that_of_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="--data-dir") as refused, fleet_folder(None):
        pass
    assert refused.value.key == "data_dir"
