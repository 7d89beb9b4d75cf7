"""The model: its configuration, weights and tokenizer files, and the forward pass over a flat batch of tokens."""
