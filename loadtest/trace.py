"""Traces of real traffic, in the form that Mooncake publishes: one JSON object a line, of one request.

    timestamp       milliseconds since the start
    input_length    tokens of the prompt
    output_length   tokens of the answer
    hash_ids        an id for each 512 tokens of the prompt; equal ids mean that all tokens up to there are equal

(R. Qin et al., "Mooncake", FAST 2025; `FAST25-release/traces` of the public repository kvcache-ai/Mooncake.) The ids
carry no text: each stands for a run of pseudo-random tokens, the last one cut at `input_length`.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from loadtest.tokens import Run, TokenSource
from loadtest.workloads import Arrival

ID_TOKENS = 512
"""As published; a trace of one's own may have other blocks."""
MAX_TOKENS = 1 << 24
"""Of a prompt, and of an answer: more than any model's context, and few enough to be made."""
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class TraceError(ValueError):
    """The file is no trace. `str(error)` names the line and what is wrong with it."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file, replayed `speed` times as fast as it was recorded."""

    path: Path
    speed: float = 1.0
    requests_per_s: float | None = None
    """Replay it at this mean rate, whatever `speed` says; a trace of one moment stays one."""
    max_requests: int | None = None
    """The first so many; None: all."""
    id_tokens: int = ID_TOKENS
    """Tokens that an id stands for."""

    def arrivals(self, *, vocab_size: int, seed: int) -> list[Arrival]:
        """The requests by time. Raises TraceError, or OSError when the file cannot be read."""
        source = TokenSource(vocab_size, seed)
        lines = sorted(self._lines(), key=lambda line: line.timestamp)
        if not lines:
            raise TraceError(f"{self.path} holds no requests")
        begin_ms = lines[0].timestamp
        recorded_s, speed = (lines[-1].timestamp - begin_ms) / 1000, self.speed
        if self.requests_per_s is not None and recorded_s:
            speed = self.requests_per_s * recorded_s / len(lines)
        # Ids may be any numbers; names are small ones.
        names: dict[int, int] = {}
        for line in lines:
            for identity in line.hash_ids:
                names.setdefault(identity, len(names))
        return [
            Arrival(
                at_s=(line.timestamp - begin_ms) / 1000 / speed,
                runs=self._runs(line, names),
                max_new_tokens=line.output_length,
                answer=len(names) + index,
                source=source,
            )
            for index, line in enumerate(lines)
        ]

    def _lines(self) -> list[_Line]:
        decoder = msgspec.json.Decoder(_Line)
        lines: list[_Line] = []
        with self.path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if len(lines) == self.max_requests:
                    break
                text = text.removeprefix(BOM_UTF8) if number == 1 else text
                if text.strip():
                    lines.append(self._decoded(decoder, text, f"{self.path}, line {number}"))
        return lines

    def _decoded(self, decoder: msgspec.json.Decoder[_Line], text: bytes, where: str) -> _Line:
        try:
            line = decoder.decode(text)
        except msgspec.MsgspecError as error:
            form = "a JSON object with timestamp, input_length, output_length and hash_ids"
            raise TraceError(f"{where}: {error}; each line must be {form}") from error
        wanted = -(-line.input_length // self.id_tokens)
        if len(line.hash_ids) != wanted:
            raise TraceError(
                f"{where}: {len(line.hash_ids)} hash_ids for {line.input_length} tokens; there must be {wanted}, one "
                f"for each {self.id_tokens} tokens"
            )
        return line

    def _runs(self, line: _Line, names: dict[int, int]) -> tuple[Run, ...]:
        *whole, last = (names[identity] for identity in line.hash_ids)
        rest = line.input_length - len(whole) * self.id_tokens
        return (*(Run(name, self.id_tokens) for name in whole), Run(last, rest))
