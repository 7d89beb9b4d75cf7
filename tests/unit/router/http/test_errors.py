"""Errors as HTTP answers."""

from __future__ import annotations

import json

import pytest

from radixfleet import errors
from router.http.errors import TooLarge, error_answer, error_response, our_fault, status_of


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequest("x"), 400),
        (TooLarge("x"), 413),
        (errors.UnknownModel("x"), 404),
        (errors.UnknownWorker("x"), 404),
        (errors.Unauthenticated("x"), 401),
        (errors.PermissionDenied("x"), 403),
        (errors.Overloaded("x"), 429),
        (errors.Unavailable("x"), 503),
        (errors.DeadlineExceeded("x"), 504),
        (errors.Cancelled("x"), 499),
        (errors.InternalError("x"), 500),
    ],
)
def test_statuses(error: errors.RadixfleetError, status: int) -> None:
    assert status_of(error) == status
    assert error_response(error).status_code == status


def test_every_error_has_a_status() -> None:
    for kind in errors.BY_REASON.values():
        assert 400 <= status_of(kind("x")) < 600


def test_the_object_names_the_field_and_a_constant() -> None:
    body = json.loads(error_response(errors.InvalidRequest("n is wrong", field="n")).body)
    assert body == {
        "error": {"message": "n is wrong", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}
    }
    assert error_answer(errors.UnknownModel("x")).error.code == "model_not_found"
    assert error_answer(errors.UnknownModel("x")).error.param is None


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"), [(0.0, "1", "1"), (0.25, "1", "250"), (2.5, "3", "2500")]
)
def test_when_to_try_again(seconds: float, whole: str, milliseconds: str) -> None:
    headers = error_response(errors.Overloaded("x", retry_after_s=seconds)).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == (whole, milliseconds)
    assert "retry-after" not in error_response(errors.Overloaded("x")).headers


def test_a_fault_of_ours_says_nothing_of_itself() -> None:
    told = our_fault(ValueError("secret"), "/v1/models")
    assert "secret" not in str(told)
    assert "incident" in str(told)
