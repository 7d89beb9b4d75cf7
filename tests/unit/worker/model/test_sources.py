from pathlib import Path

import pytest

from worker.model import sources
from worker.model.errors import ModelNotFound, ModelNotGiven
from worker.model.sources import resolve_model


def test_directories_and_gguf_files_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve_model(str(file)) == file
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m.gguf") == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == file


def test_demo_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def fetch(progress: object) -> Path:
        assert callable(progress)
        progress("hello")
        return Path("/cache/demo.gguf")

    monkeypatch.setattr(sources, "fetch_demo_model", fetch)
    assert resolve_model("demo", said.append) == Path("/cache/demo.gguf")
    assert said == ["hello"]


def test_what_is_not_there_or_not_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r'no model at .*nowhere: give a Hugging Face directory .* or "demo"'):
        resolve_model(str(tmp_path / "nowhere"))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"neither a directory nor a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_directory_without_a_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    """Of GGUF files in it one has to be named: there may be several, and a directory is Hugging Face's form."""
    with pytest.raises(ModelNotGiven, match=r"has no config\.json: is it a Hugging Face model directory\?$"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelNotGiven, match=r"name the file: .*/m\.gguf$"):
        resolve_model(str(tmp_path))
