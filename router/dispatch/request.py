"""A request that is ready to be sent to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes
from radixfleet.types import BlockHash, TokenArray
from radixfleet.v1 import inference_pb2

HashArray: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """Validated, tokenized and hashed, once, however often it is tried."""

    request_id: str
    model: str
    """The model's own name, never empty."""
    tokens: TokenArray
    seed: BlockHash
    """Where the chain of block hashes begins."""
    block_hashes: HashArray
    """uint64 [len(tokens) // 64]; empty when the worker may not use what it has cached."""
    fingerprint: int | None
    """Of the tokenizer that made the tokens: other tokenizers' workers cannot take them. None: the client sent ids."""
    message: inference_pb2.GenerateRequest
    """What the worker is sent: the prompt as packed token ids."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.tokens)

    def output_hashes(self, output: TokenArray) -> HashArray:
        """Hashes of the whole blocks that `output` completed, the chain continued from the prompt's last whole block.

        The last token is left out: it was sampled and never computed, so the worker has no KV of it.
        """
        parent = BlockHash(int(self.block_hashes[-1])) if len(self.block_hashes) else self.seed
        tail = self.tokens[len(self.block_hashes) * BLOCK_TOKENS :]
        return chain_hashes(parent, np.concatenate([tail, output[:-1]]))
