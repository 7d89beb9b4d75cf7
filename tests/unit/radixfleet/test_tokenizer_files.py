from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

import pytest

from radixfleet.tokenizer_files import archived_files, spec_from_directory
from tests.support.tiny_model import EOS_TOKEN_ID, tiny_model
from worker.dialects.tokenizer_archive import tokenizer_archive
from worker.model.tokenizer_files import load_tokenizer_spec


def zipped(**files: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "."), text)
    return buffer.getvalue()


def damaged(data: bytes) -> bytes:
    """What is behind the first file's header is another thing."""
    begin = 30 + len("tokenizer.json")
    return data[:begin] + b"\xff" * 8 + data[begin + 8 :]


def test_an_engine_that_sends_a_directorys_files_has_the_tokenizer_of_a_worker_that_reads_it(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model(), directory)
    (directory / "chat_template.jinja").write_text("plain")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    read = load_tokenizer_spec(directory)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in directory.rglob("*"):
            if path.suffix in (".json", ".jinja"):
                archive.write(path, path.relative_to(directory))
    sent = archived_files(buffer.getvalue()).spec(eos_token_ids=[EOS_TOKEN_ID], vocab_size=512)
    assert sent.fingerprint() == read.fingerprint()


def test_what_our_worker_sends_other_gateways_makes_its_own_tokenizer_again() -> None:
    spec = load_tokenizer_spec(tiny_model())
    data = tokenizer_archive(spec, max_context_tokens=4096)
    again = archived_files(data).spec(eos_token_ids=spec.eos_token_ids, vocab_size=spec.vocab_size)
    assert again == spec


def test_settings_are_read_as_hugging_face_reads_them() -> None:
    tokenizer = (tiny_model() / "tokenizer.json").read_text()
    odd = r'{"bos_token": "a", "longest": Infinity, "least": NaN, "most": 1e400, "half": "\ud800"}'
    sent = archived_files(zipped(tokenizer__json=tokenizer, tokenizer_config__json=odd))
    spec = sent.spec(eos_token_ids=[1], vocab_size=512)
    assert spec.bos_token == "a"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"no zip", "no zip"),
        (zipped(config__json="{}"), "no tokenizer.json"),
        (zipped(tokenizer__json="{}"), "cannot be read"),
        (damaged(zipped(tokenizer__json=str(list(range(100))))), "no zip that can be read: .* decompressing"),
        (zipped(tokenizer__json="{}", tokenizer_config__json="[]"), "^tokenizer_config.json holds no JSON object"),
        (zipped(tokenizer__json="{}", tokenizer_config__json="{"), "^tokenizer_config.json is no JSON: Expecting"),
        (zipped(tokenizer__json="{}", tokenizer_config__json="[" * 10**5), "^tokenizer_config.json is no JSON: .*rec"),
    ],
)
def test_what_is_no_tokenizer_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        archived_files(data).spec(eos_token_ids=[1], vocab_size=10)


def test_a_directory_is_refused_with_the_name_of_the_file_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_model() / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"holds no tokenizer that can be read: config.json holds no JSON object"):
        spec_from_directory(tmp_path)
