"""What one worker can take: fixed once the runner has planned its memory, and the arithmetic of what can never fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from worker.core.messages import Ready
from worker.core.step import rows_for
from worker.memory.advisor import MORE_KV, Bound
from worker.memory.plan import kv_bound_of

Order: TypeAlias = Literal["fcfs", "lpm", "priority"]
"""Who leaves the queue first: the oldest; the one with the longest cached prefix (with aging); the highest priority."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and choices that the scheduler works within."""

    num_pages: int
    """Pages of the KV pool, the padding sink (page 0, never used) among them."""
    page_size: int
    max_running_requests: int
    """Requests that are planned step by step, and the most sequences in a step."""
    chunked_prefill_size: int
    """Prompt tokens in one step; running decodes are taken out of it, down to a quarter (see `prefill_budget`)."""
    max_context_tokens: int
    """Longest prompt + completion."""
    order: Order = "fcfs"
    preempt: bool = False
    """With priority: retract running requests for waiting ones of higher priority that find no row or no room."""
    max_overtakes: int = 64
    """With lpm: times that requests that came later may be admitted before one, which bounds its wait."""
    step_cost_tokens: int = 0
    """See `Ready`. Keeps prompts that wait from being computed all at once: see `prefill.enough_tokens`."""
    shared_prefix_tokens: int = 64
    """A request waits for another that is computing at least this many prompt tokens which it needs too."""
    kv_bound: Bound = Bound.FRACTION
    """What the size of the KV pool comes from, so that advice names the setting that would change it."""

    @classmethod
    def from_ready(cls, ready: Ready, order: Order = "fcfs", *, preempt: bool = False) -> Limits:
        """The limits of the worker whose runner said `ready`."""
        capacity = ready.capacity
        return cls(
            num_pages=capacity.kv_tokens // capacity.page_size + 1,
            page_size=capacity.page_size,
            max_running_requests=capacity.max_running_requests,
            chunked_prefill_size=capacity.chunked_prefill_size,
            max_context_tokens=ready.max_context_tokens,
            step_cost_tokens=ready.step_cost_tokens,
            order=order,
            preempt=preempt and order == "priority",
            kv_bound=kv_bound_of(ready.memory),
        )

    @property
    def num_rows(self) -> int:
        """Requests that may hold a row."""
        return rows_for(self.max_running_requests)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return (self.num_pages - 1) * self.page_size

    def prefill_budget(self, num_decodes: int) -> int:
        """Prompt tokens that a step may compute beside `num_decodes` decodes, which never starve prompts altogether.

        So no step has more than chunked_prefill_size + max_running_requests tokens.
        """
        return max(self.chunked_prefill_size - num_decodes, -(-self.chunked_prefill_size // 4))

    def refusal(self, prompt_tokens: int, max_new_tokens: int) -> str | None:
        """Why a request can never be served here, for its client; None when it can."""
        if prompt_tokens < 1:
            return "the prompt is empty; send at least one token"
        if max_new_tokens < 1:
            return f"max_new_tokens is {max_new_tokens}; it must be at least 1"
        total = prompt_tokens + max_new_tokens
        tokens = "1 token" if prompt_tokens == 1 else f"{prompt_tokens} tokens"
        wanted = f"the prompt has {tokens} and max_new_tokens is {max_new_tokens}, {total} together"
        if total > self.max_context_tokens and self.max_context_tokens < self.kv_tokens:
            return (
                f"{wanted}, but the context is {self.max_context_tokens} tokens; shorten the prompt, lower "
                "max_new_tokens, or, where the model allows it, raise the worker's --context-length"
            )
        if total > self.kv_tokens:
            return (
                f"{wanted}, but this worker's KV pool holds {self.kv_tokens} tokens; shorten the prompt, lower "
                f"max_new_tokens, or give the worker a larger KV pool: {MORE_KV[self.kv_bound]}"
            )
        return None
