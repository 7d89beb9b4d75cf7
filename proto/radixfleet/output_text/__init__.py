"""From token ids to the text that a client receives, one token at a time. Pure: no event loop, no wire."""
