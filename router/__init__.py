"""The router process: sends each request to the worker where the least work is left to do."""
