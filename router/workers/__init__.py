"""The workers that the router knows: dialled, watched, and kept account of."""
