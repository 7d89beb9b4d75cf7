"""A request that is ready to be sent to a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from radixfleet import convert
from radixfleet.blocks import BLOCK_TOKENS, chain_hashes
from radixfleet.types import BlockHash, HashArray, TokenArray
from radixfleet.v1 import inference_pb2

_PACKED_BYTES = 4
"""Of a token id in the packed form."""
NO_TOKENIZER = 0
"""In the place of a tokenizer's fingerprint: the tokens only stand in for those that the engine will make."""


@dataclass(slots=True, eq=False)
class PreparedRequest:
    """Validated, tokenized and hashed, once, however often it is tried. Never written; freezing it would cost 3 us."""

    request_id: str
    model: str
    """The model's own name, never empty."""
    tokens: TokenArray
    """The prompt, and behind it what the client has of the answer already."""
    seed: BlockHash
    """Where the chain of block hashes begins."""
    block_hashes: HashArray
    """uint64 [len(tokens) // 64]; empty when the worker may not use what it has cached."""
    fingerprint: int | None
    """Of the tokenizer that made the tokens: other tokenizers' workers cannot take them. None: the client sent ids."""
    message: inference_pb2.GenerateRequest
    """What the worker is sent: the prompt as packed token ids."""
    resumable: bool = False
    """When its worker is lost in the middle of the answer, another one may go on with it."""
    source: inference_pb2.Prompt | None = None
    """The prompt as the client wrote it, for engines that take no token ids; None: it sent ids, or nobody needs it."""
    look_aside: bool = False
    """The client will call the worker itself, in our own dialect (`Fleet.Route`)."""

    @property
    def prompt_tokens(self) -> int:
        """Length of `tokens`: for a worker, all of it is prompt."""
        return len(self.tokens)

    @property
    def answer_tokens(self) -> int:
        """The most tokens that come behind `tokens`; 1 where the client sets no limit: then any room is enough."""
        limit: int = self.message.sampling.max_new_tokens
        if self.message.HasField("generated"):
            limit -= len(self.message.generated.packed) // _PACKED_BYTES
        return max(1, limit)

    def output_hashes(self, output: TokenArray) -> HashArray:
        """Hashes of the whole blocks that `output` completed, the chain continued from the prompt's last whole block.

        The last token is left out: it was sampled and never computed, so the worker has no KV of it.
        """
        return self._hashes_behind(output[:-1])

    def continued(self, output: TokenArray) -> PreparedRequest:
        """The request for the rest of its answer, of which the client has got `output`."""
        message = inference_pb2.GenerateRequest()
        message.CopyFrom(self.message)
        message.generated.packed += convert.pack_tokens(output).packed
        return replace(
            self,
            tokens=np.concatenate([self.tokens, output]),
            block_hashes=np.concatenate([self.block_hashes, self._hashes_behind(output)]),
            message=message,
        )

    def _hashes_behind(self, output: TokenArray) -> HashArray:
        parent = BlockHash(int(self.block_hashes[-1])) if len(self.block_hashes) else self.seed
        tail = self.tokens[len(self.block_hashes) * BLOCK_TOKENS :]
        return chain_hashes(parent, np.concatenate([tail, output]))
