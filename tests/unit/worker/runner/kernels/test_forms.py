"""The kernels as other CPUs get them, and under sanitizers: a few of the cases that `tests.kernels.forms` has."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.kernels.forms import FORMS, CannotRun, ChecksFailed, Form, Sanitizer, run_form

BY_NAME = {form.name: form for form in FORMS}
OWN = Form("its own", (), (platform.machine(),))
RUNS: list[tuple[str, Sanitizer]] = [
    ("AMX", "address"),
    ("AVX512", "none"),
    ("AVX2", "address"),
    ("AVX2", "thread"),
    ("no vector instructions", "none"),
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
    kinds = ("attention in float32", "attention in bfloat16", "linear, gated", "drawn tokens", "whole steps", "teams")
    assert all(kind in said for kind in kinds)


def test_a_form_that_this_machine_cannot_run_says_what_it_lacks() -> None:
    unheard_of = Form("unheard of", (), BY_NAME["AVX2"].machines, frozenset({"avx512_unheard_of"}))
    with pytest.raises(CannotRun, match=r"avx512_unheard_of|another kind"):
        run_form(unheard_of, "thread", seed=1, cases=1, threads=1)


@pytest.mark.parametrize(
    ("compiler", "why"), [("no-such-compiler", "there is no no-such-compiler"), ("gcc '", "not a command")]
)
def test_a_cc_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, compiler: str, why: str) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(CannotRun, match=why):
        run_form(OWN, "none", seed=1, cases=1, threads=1)


def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, probe: str, checks: str) -> None:
    """Makes a $CC of two lines of shell: for the least program, and for the checks. $target is to be written."""
    script = tmp_path / "cc"
    words = 'for word; do target=$word; case "$word" in *main.c) is_checks=1;; esac; done'
    script.write_text(f'#!/bin/sh\n{words}\nif [ "$is_checks" ]; then {checks}; else {probe}; fi\n')
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))


def test_a_compiler_that_lacks_a_form_is_told_from_sources_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "echo bad value native >&2; exit 1"
    compiles(tmp_path, monkeypatch, probe=fails, checks=fails)
    with pytest.raises(CannotRun, match="lacks something for this form: bad value native"):
        run_form(OWN, "none", seed=1, cases=1, threads=1)
    compiles(tmp_path, monkeypatch, probe=":", checks=fails)
    with pytest.raises(ChecksFailed, match="bad value native"):
        run_form(OWN, "none", seed=1, cases=1, threads=1)


def test_kernels_that_take_another_form_than_they_should_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes = r"printf '#!/bin/sh\necho uses another\n' > $target; chmod 700 $target"
    compiles(tmp_path, monkeypatch, probe=":", checks=makes)
    with pytest.raises(ChecksFailed, match="a program for its own uses another"):
        run_form(OWN, "none", seed=1, cases=1, threads=1)
