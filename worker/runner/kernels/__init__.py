"""Kernels for CPUs in C, compiled at first use with the machine's compiler, called without the interpreter's lock."""
