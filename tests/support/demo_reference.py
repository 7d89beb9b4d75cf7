"""What transformers answers with the demonstration model: computed once, kept in `tests/data/demo_reference.json`.

Computing it takes a minute; a test compares some of it with what transformers says now. `python -m
tests.support.demo_reference` writes the file anew, which the change of a prompt or of the model asks for.
"""

from __future__ import annotations

import json
from pathlib import Path

from radixfleet.text import Tokenizer
from radixfleet.types import ChatMessage, ChatPrompt
from tests.support.transformers_reference import ReferenceTokens, greedy_tokens, load_llama_gguf
from worker.model.sources import resolve_model
from worker.model.tokenizer_files import load_tokenizer_spec

FILE = Path(__file__).parents[1] / "data" / "demo_reference.json"
NUM_TOKENS = 64
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 90, 127, 128, 129, 200, 301)
"""In tokens: around the borders of pages and chunks, and in between."""

TEXT = """The history of the lighthouse begins with fires lit on hilltops to guide mariners into port. Raising the fire
would improve its visibility, so placing it on a platform became a practice that led to the development of the
lighthouse. In antiquity, the lighthouse functioned more as an entrance marker to ports than as a warning signal for
reefs and promontories, unlike many modern lighthouses. The most famous lighthouse structure from antiquity was the
Pharos of Alexandria, which collapsed following a series of earthquakes between 956 and 1323. The intact Tower of
Hercules at A Coruña gives insight into ancient lighthouse construction; other evidence about lighthouses exists in
depictions on coins and mosaics, of which many represent the lighthouse at Ostia. Coins from Alexandria and Laodicea
also exist. Modern construction began in the early eighteenth century, as transatlantic trade encouraged the building of
1,234 new towers. Advances in structural engineering and lighting equipment allowed for larger and more powerful ones,
including ones exposed to the sea. The function of lighthouses was gradually changed from indicating ports to the
providing of a visible warning against shipping hazards, such as rocks or reefs."""


def demo_prompts(path: Path) -> list[list[int]]:
    """Text from different places, and chats: no two begin alike, but for the chat template's system prompt."""
    tokenizer = Tokenizer(load_tokenizer_spec(path))
    text = tokenizer.encode(TEXT).tolist()
    chats = [
        tokenizer.encode_chat(ChatPrompt((ChatMessage("user", question),))).tolist()
        for question in ("Why is the sky blue?", "Add 1234 and 4321.", "Write a haiku about the sea.")
    ]
    slices = [text[start : start + length] for start, length in zip(range(0, 220, 10), LENGTHS, strict=True)]
    return [*slices[: len(LENGTHS) - len(chats)], *chats]


def demo_reference(prompts: list[list[int]]) -> ReferenceTokens:
    """From the file. The prompts must be those for which it was made."""
    kept = json.loads(FILE.read_text())
    assert kept["prompts"] == prompts, "the prompts are others now: python -m tests.support.demo_reference"
    return ReferenceTokens(kept["token_ids"], kept["gaps"])


def main() -> None:
    """Write the file."""
    path = resolve_model("demo")
    prompts = demo_prompts(path)
    reference = greedy_tokens(load_llama_gguf(path), prompts, NUM_TOKENS)
    gaps = [[round(gap, 6) for gap in row] for row in reference.gaps]
    rows = {"prompts": prompts, "token_ids": reference.token_ids, "gaps": gaps}
    lines = [
        f'"{name}": [\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in lists) + "\n]"
        for name, lists in rows.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{FILE}: {len(prompts)} prompts, {NUM_TOKENS} tokens each")


if __name__ == "__main__":
    main()
