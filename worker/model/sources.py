"""Where a model comes from: the operator's `--model` becomes a path on this machine. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from worker.model.demo_model import fetch_demo_model
from worker.model.errors import ModelNotGiven

DEMO = "demo"


def resolve_model(model: str, progress: Callable[[str], None] = lambda _text: None) -> Path:
    """The path for "demo", a Hugging Face directory or a GGUF file. May download the demonstration model, and blocks.

    `progress` is called with a line of text now and then. Raises ModelNotGiven, or ModelNotFound without a network.
    """
    if model == DEMO:
        return fetch_demo_model(progress)
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelNotGiven(
            f"{path.resolve()} has no config.json: is it a Hugging Face model directory?{_named_gguf(path)}"
        )
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if path.exists():
        raise ModelNotGiven(f"{path} is neither a directory nor a .gguf file")
    raise ModelNotGiven(
        f"no model at {path}: give a Hugging Face directory (config.json, *.safetensors, tokenizer.json), "
        f'a .gguf file, or "{DEMO}"'
    )


def _named_gguf(directory: Path) -> str:
    """What to write instead, where the directory holds GGUF files."""
    found = sorted(directory.glob("*.gguf"))
    return f" To serve a GGUF file, name the file: {found[0]}" if found else ""
