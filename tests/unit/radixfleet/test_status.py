"""Errors over a real call: the client gets the error that the server raised."""

from __future__ import annotations

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from radixfleet import errors
from radixfleet.channel import open_channel
from radixfleet.deadline import Deadline
from radixfleet.errors import InvalidRequest, Overloaded, RadixfleetError
from radixfleet.status import error_from_rpc, error_from_status, status_from_error, stream_error
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fake_inference import FakeInference, serving

REQUEST = inference_pb2.TokenizeRequest()

EXAMPLES = [
    (InvalidRequest("top_p is 7", field="sampling.top_p", given="7"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownModel("no model x", model="x"), grpc.StatusCode.NOT_FOUND),
    (errors.UnknownWorker("no worker w"), grpc.StatusCode.NOT_FOUND),
    (errors.Unauthenticated("no key"), grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDenied("a client's key"), grpc.StatusCode.PERMISSION_DENIED),
    (Overloaded("queue full", retry_after_s=1.25, waiting="512"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable("loading: été", retry_after_s=0.0), grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled("gone"), grpc.StatusCode.CANCELLED),
    (errors.InternalError("our fault"), grpc.StatusCode.INTERNAL),
]


async def failure_of(error: RadixfleetError) -> grpc.aio.AioRpcError:
    async with serving(FakeInference(unary_errors=[error])) as address, open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(REQUEST)
    return caught.value


def test_every_kind_of_error_has_an_example_here():
    assert (
        {type(error) for error, _ in EXAMPLES}
        == set(errors.BY_REASON.values())
        == set(RadixfleetError.__subclasses__())
    )


@pytest.mark.parametrize(("error", "code"), EXAMPLES, ids=lambda item: type(item).__name__)
async def test_error_to_status_to_error(error, code):
    failure = await failure_of(error)
    assert failure.code() is code
    assert failure.details() == str(error)
    received = error_from_rpc(failure)
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert received.metadata == error.metadata
    assert received.retry_after_s == error.retry_after_s
    assert getattr(received, "field", None) == getattr(error, "field", None)


def details(error: RadixfleetError) -> dict[str, object]:
    kinds = (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.BadRequest)
    found = {}
    for packed in status_from_error(error).details:
        for kind in kinds:
            message = kind()
            if packed.Unpack(message):
                found[kind.__name__] = message
    return found


def test_details_are_those_of_google_rpc():
    refused = details(InvalidRequest("top_p is 7", field="sampling.top_p", given="7"))
    assert set(refused) == {"ErrorInfo", "BadRequest"}
    assert refused["ErrorInfo"].domain == "radixfleet"
    assert refused["ErrorInfo"].reason == "INVALID_REQUEST"
    assert dict(refused["ErrorInfo"].metadata) == {"given": "7"}
    assert [violation.field for violation in refused["BadRequest"].field_violations] == ["sampling.top_p"]
    full = details(Overloaded("full", retry_after_s=1.5))
    assert full["RetryInfo"].retry_delay.ToMilliseconds() == 1500
    assert set(details(Overloaded("full"))) == {"ErrorInfo"}
    assert set(details(InvalidRequest("no field"))) == {"ErrorInfo"}


@pytest.mark.parametrize("text", ["x" * 100_000, "€" * 100_000, "\0\n" * 50_000, "bad \ud800 surrogate"])
async def test_any_message_arrives(text):
    """gRPC drops trailers that are too long, status details and all; a message must not cost the client its error."""
    many = {f"entry{index}": text for index in range(20)}
    received = error_from_rpc(await failure_of(InvalidRequest(text, field="prompt", **many)))
    assert type(received) is InvalidRequest
    assert received.field == "prompt"
    assert received.metadata["entry0"][:4] == text[:4]
    assert str(received)[:4] == text[:4]


def test_the_status_library_of_other_clients_reads_it():
    status = rpc_status.to_status(status_from_error(Overloaded("full", retry_after_s=1)))
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status.details == "full"
    assert [key for key, _ in status.trailing_metadata] == ["grpc-status-details-bin"]


def bare(
    code: grpc.StatusCode, text: str = "said so", trailers: tuple[tuple[str, bytes], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=text)


def test_an_answer_whose_connection_breaks_says_how_far_it_got():
    error = stream_error(bare(grpc.StatusCode.UNAVAILABLE, "Socket closed"), "r:1", 7)
    assert isinstance(error, errors.Unavailable)
    assert str(error).startswith("the connection to r:1 broke after 7 tokens: the answer is not complete.")
    assert (error.metadata, error.retry_after_s) == ({"delivered_tokens": "7"}, 1.0)


@pytest.mark.parametrize(
    "told", ["", "Stream removed (Socket closed (GOAWAY received; Error code: 0; Debug Text: Server shutdown))"]
)
def test_a_server_that_went_away_is_told_without_the_terms_of_grpc(told: str):
    broken = bare(grpc.StatusCode.UNAVAILABLE, told)
    assert str(stream_error(broken, "r:1", 7)).endswith("is most likely still cached (the server went away)")
    assert str(error_from_rpc(broken)) == ("the server went away" if told else "UNAVAILABLE")


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL])
def test_a_deadline_that_passes_as_the_connection_ends_is_a_deadline(code: grpc.StatusCode):
    error = error_from_rpc(bare(code, "Stream removed (Deadline Exceeded)"))
    assert isinstance(error, errors.DeadlineExceeded)
    assert isinstance(stream_error(bare(code, "Stream removed (Deadline Exceeded)"), "r:1", 7), errors.DeadlineExceeded)
    assert str(Deadline(5.0, 0.0).named(error)).startswith("no answer within the client's timeout of 5 s: ")
    assert isinstance(error_from_rpc(bare(code, "Stream removed")), errors.InternalError)


def test_a_call_that_nobody_here_cancelled_was_dropped_by_a_server_that_stops():
    """So it may be tried again, by a client that waits for the next one."""
    dropped = bare(grpc.StatusCode.CANCELLED, "")
    assert isinstance(error_from_rpc(dropped), errors.Unreachable)
    assert "broke after 7 tokens" in str(stream_error(dropped, "r:1", 7))


def test_what_the_other_side_said_of_a_stream_is_left_as_it_is():
    ours = errors.Unavailable("worker w was lost after 3 tokens")
    trailers = (("grpc-status-details-bin", status_from_error(ours).SerializeToString()),)
    assert str(stream_error(bare(grpc.StatusCode.UNAVAILABLE, str(ours), trailers), "r:1", 3)) == str(ours)
    assert "Socket closed" in str(stream_error(bare(grpc.StatusCode.UNAVAILABLE, "Socket closed"), "r:1", None))
    late = stream_error(bare(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), "r:1", 3)
    assert isinstance(late, errors.DeadlineExceeded)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.OUT_OF_RANGE, errors.InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, errors.UnknownModel),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDenied),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.UNAVAILABLE, errors.Unreachable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.INTERNAL, errors.InternalError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
        (grpc.StatusCode.DATA_LOSS, errors.InternalError),
    ],
)
def test_statuses_of_others_are_taken_by_their_code(code, kind):
    error = error_from_rpc(bare(code))
    assert type(error) is kind
    assert str(error) == "said so"


def test_details_of_another_domain_are_not_ours():
    info = error_details_pb2.ErrorInfo(domain="googleapis.com", reason="OVERLOADED")
    status = status_from_error(errors.InternalError("x"))
    status.details[0].Pack(info)
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    assert type(error_from_rpc(bare(grpc.StatusCode.UNAVAILABLE, trailers=trailers))) is errors.Unavailable


def test_trailers_that_are_no_status_are_passed_over():
    trailers = (("grpc-status-details-bin", b"\xff\xff\xff"), ("other", "text"))
    assert type(error_from_rpc(bare(grpc.StatusCode.UNAVAILABLE, trailers=trailers))) is errors.Unreachable


@pytest.mark.parametrize("kind", ["ErrorInfo", "RetryInfo", "BadRequest"])
def test_details_that_cannot_be_read_are_passed_over(kind: str):
    """A link's reader must not end, with all requests on it, by what a worker says of one."""
    status = status_from_error(Overloaded("full"))
    status.details.add(type_url=f"type.googleapis.com/google.rpc.{kind}", value=b"\xff\xff")
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    failed = bare(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailers)
    for error in (error_from_status(status), error_from_rpc(failed)):
        assert (type(error), str(error)) == (Overloaded, "full")


def test_a_wait_without_an_end_is_one_that_can_be_told():
    assert details(Overloaded("full", retry_after_s=1e300))["RetryInfo"].retry_delay.ToSeconds() == 86400


def test_a_message_too_large_is_not_worth_another_try():
    """Behaviour 41: gRPC says RESOURCE_EXHAUSTED for it, which a client would otherwise try again."""
    error = error_from_rpc(bare(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Sent message larger than max (5 vs. 4)"))
    assert type(error) is InvalidRequest


def test_reserved_names_in_metadata_do_no_harm():
    error = InvalidRequest("x", field="f")
    error.metadata = {"field": "other", "message": "m", "retry_after_s": "7"}
    status = status_from_error(error)
    received = error_from_rpc(
        bare(grpc.StatusCode.INVALID_ARGUMENT, "x", (("grpc-status-details-bin", status.SerializeToString()),))
    )
    assert (received.field, received.retry_after_s, received.metadata) == ("f", None, error.metadata)
