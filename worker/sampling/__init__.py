"""Choosing tokens from logits: greedy, or drawn with a randomness that depends on (seed, position) alone."""
