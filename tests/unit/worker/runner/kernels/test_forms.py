"""The kernels as other CPUs get them, and under sanitizers: a few of the cases that `tests.kernels.forms` has."""

from __future__ import annotations

import platform

import pytest

from tests.kernels.forms import FORMS, CannotRun, Form, Sanitizer, run_form

BY_NAME = {form.name: form for form in FORMS}
RUNS: list[tuple[str, Sanitizer]] = [
    ("AMX", "address"),
    ("AVX2", "address"),
    ("AVX2", "thread"),
    ("NEON", "none" if platform.machine() not in BY_NAME["NEON"].machines else "address"),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compilers, sanitizers and an emulator, on a machine that may be busy
@pytest.mark.parametrize(("form", "sanitizer"), RUNS, ids=lambda value: str(value))
def test_a_form_computes_what_double_precision_does_within_its_memory(form: str, sanitizer: Sanitizer) -> None:
    try:
        said = run_form(BY_NAME[form], sanitizer, seed=1, cases=8, threads=3)
    except CannotRun as error:
        pytest.skip(str(error))
    kinds = ("attention in float32", "attention in bfloat16", "linear, gated", "whole steps", "teams")
    assert all(kind in said for kind in kinds)


def test_a_form_that_this_machine_cannot_run_says_what_it_lacks() -> None:
    unheard_of = Form("unheard of", (), BY_NAME["AVX2"].machines, frozenset({"avx512_unheard_of"}))
    with pytest.raises(CannotRun, match=r"avx512_unheard_of|another kind"):
        run_form(unheard_of, "thread", seed=1, cases=1, threads=1)
