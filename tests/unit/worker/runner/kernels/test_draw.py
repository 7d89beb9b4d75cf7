from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.runner.kernels.compiler import find_compiler
from worker.runner.kernels.draw import KernelDraw
from worker.runner.kernels.library import Kernels
from worker.sampling.batch import SamplingBatch
from worker.sampling.host_draw import Drawing, thresholds, winners_by_bounds
from worker.sampling.noise import gumbel, hashes


@pytest.fixture(scope="module")
def draw() -> KernelDraw:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    return KernelDraw(Kernels(num_threads=1))


@settings(max_examples=100, deadline=None)
@given(
    vocab_size=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    temperature=st.sampled_from([1e-45, 1e-30, 0.01, 0.7, 1.0, 3.0, 1e30]),
    top_k=st.sampled_from([0, 0, 1, 20, 2000]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.95, 0.9999]),
    seed=st.integers(0, 2**32),
)
@example(vocab_size=3000, spread=0.0, temperature=1.0, top_k=0, top_p=1.0, seed=0)
def test_the_kernel_draws_what_the_form_in_numpy_draws(
    draw: KernelDraw, vocab_size: int, spread: float, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    """Behaviour 31: with and without a compiler a seed gives the same tokens."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((6, vocab_size)) * spread).astype(np.float32)
    logits[random.random(logits.shape) < 0.1] = -np.inf
    logits[:, vocab_size // 2] = 1.0
    rows = np.array([4, 0, 5])
    ones = np.ones(3)
    batch = SamplingBatch(
        temperature=(ones * temperature).astype(np.float32),
        top_k=np.full(3, top_k),
        top_p=ones * top_p,
        min_p=ones * 0,
        seeds=random.integers(0, 2**63, 3).astype(np.uint64),
        positions=random.integers(0, 2**40, 3),
    )
    drawing = Drawing(logits, rows, logits[rows].max(1), batch)
    least = thresholds(drawing)
    by_numpy, by_kernel = winners_by_bounds(drawing, least), draw(drawing, least)
    scores = drawing.scores(slice(0, 3))
    values = [
        scores[range(3), tokens] + gumbel(hashes(batch.streams, tokens.astype(np.uint32)[:, None])[:, 0])
        for tokens in (by_numpy, by_kernel)
    ]
    assert (by_kernel == by_numpy)[values[0] - values[1] > 1e-9].all()
    assert (scores[range(3), by_kernel] >= least).all()
    np.testing.assert_allclose(values[1], values[0], rtol=0, atol=1e-9)
