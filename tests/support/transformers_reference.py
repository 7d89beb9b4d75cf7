"""Greedy generation by transformers: an independent implementation with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

TIE = 1e-3
"""Where the two best logits are nearer than this, two right implementations may choose differently."""


@dataclass(frozen=True)
class ReferenceTokens:
    """Greedy continuations of some prompts."""

    token_ids: list[list[int]]
    gaps: list[list[float]]
    """Best minus second-best logit at each token."""

    def of(self, some: slice) -> ReferenceTokens:
        """Of these prompts alone."""
        return ReferenceTokens(self.token_ids[some], self.gaps[some])

    def differences(self, token_ids: Sequence[Sequence[int]]) -> int:
        """Number of continuations that part from the reference at a tie; a parting anywhere else is a failure.

        They may be shorter than the reference's.
        After a tie went the other way the texts are different ones, so that the rest of it is not compared.
        """
        num_ties = 0
        for number, (ours, theirs, gaps) in enumerate(zip(token_ids, self.token_ids, self.gaps, strict=True)):
            assert ours
            parting = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if parting is not None:
                message = (
                    f"prompt {number} differs at token {parting}, where the best logit leads by {gaps[parting]:.5f}"
                )
                assert gaps[parting] < TIE, message
                num_ties += 1
        return num_ties


def load_llama_gguf(path: Path) -> PreTrainedModel:
    """The model in a GGUF file of the llama architecture, read by transformers' own loader, float32.

    `from_pretrained(gguf_file=...)` does the same, but asks for a package more.
    """
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    model.load_state_dict(tensors, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are computed, not loaded
    return model.float().eval()


@torch.inference_mode()
def greedy_tokens(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> ReferenceTokens:
    """Greedy continuations, with prompts of like lengths in one batch, padded on the left."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    token_ids: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    for members in (order[begin : begin + 8] for begin in range(0, len(order), 8)):
        longest = max(len(prompts[index]) for index in members)
        padded = torch.zeros((len(members), longest), dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, index in enumerate(members):
            padded[row, longest - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[row, longest - len(prompts[index]) :] = 1
        generated = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack(generated.logits).topk(2, dim=-1).values
        for row, index in enumerate(members):
            token_ids[index] = generated.sequences[row, longest:].tolist()
            gaps[index] = (best[:, row, 0] - best[:, row, 1]).tolist()
    return ReferenceTokens(token_ids, gaps)
