"""The radixfleet command as a script sees it: output, exit codes, one-line errors."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deploy import command_line
from deploy.doctor.inspection import Finding
from radixfleet.answers import FleetReport
from radixfleet.errors import InvalidRequest, Unauthenticated, Unavailable
from radixfleet.heard import fleet_state, worker_entry
from radixfleet.v1 import fleet_pb2
from tests.support.fake_inference import FakeInference, delta, finished, serving, started, told

ANSWER = (
    started(request_id="r", prompt_tokens=12, cached_tokens=8),
    delta(5, text="Hel"),
    delta(6, 7, text="lo"),
    finished(text="!", usage={"prompt_tokens": 12, "cached_tokens": 8, "completion_tokens": 3}),
)


@contextmanager
def served(fake: FakeInference) -> Iterator[str]:
    """The fake on a thread of its own: the command runs its own event loop in ours."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server = serving(fake)
        address = asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
        try:
            yield address
        finally:
            asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("scheme", ["", "dns:///"])
def test_generate_streams_the_text(radixfleet, scheme):
    with served(FakeInference([ANSWER])) as address:
        code, out, err = radixfleet("generate", "--prompt", "Hi", "--endpoint", scheme + address)
    assert (code, out, err) == (0, "Hello!\n", "")


def test_generate_json_is_one_object_with_all_that_a_script_asks_for(radixfleet):
    with served(FakeInference([ANSWER])) as address:
        code, out, _ = radixfleet("generate", "--prompt", "Hi", "--json", "--endpoint", address)
    answer = json.loads(out)
    assert code == 0
    assert answer.pop("ttft_s") <= answer.pop("total_s")
    assert answer == {
        "text": "Hello!",
        "token_ids": [5, 6, 7],
        "request_id": "r",
        "worker": "w",
        "reason": "direct",
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "completion_tokens": 3,
        "finish_reason": "stop",
    }


SEVERAL = (
    started(request_id="r", prompt_tokens=12),
    delta(5, text="Hel", index=1, logprobs=[told(-0.5, (5, -0.5), (6, -1.25))]),
    delta(7, text="Bye", index=0, logprobs=[told(-2.0, (5, -0.5), (7, -2.0))]),
    finished(index=0, usage=None),
    finished(text="lo", index=1, usage={"prompt_tokens": 12, "completion_tokens": 2}),
)


def test_several_completions_are_printed_one_after_another(radixfleet):
    fake = FakeInference([SEVERAL])
    with served(fake) as address:
        code, out, _ = radixfleet("generate", "-p", "Hi", "--n", "2", "--logprobs", "2", "--endpoint", address)
    assert code == 0
    assert out == (
        "--- 0 (stop)\nBye\n       7   -2.000   5:-0.500  7:-2.000\n"
        "--- 1 (stop)\nHello\n       5   -0.500   5:-0.500  6:-1.250\n"
    )
    assert (fake.requests[0].sampling.n, fake.requests[0].sampling.logprobs) == (2, 2)


def test_several_completions_as_json(radixfleet):
    with served(FakeInference([SEVERAL])) as address:
        _, out, _ = radixfleet("generate", "-p", "Hi", "--n", "2", "--json", "--endpoint", address)
    answer = json.loads(out)
    assert (answer["text"], answer["completion_tokens"]) == ("Bye", 2)
    assert [choice["text"] for choice in answer["choices"]] == ["Bye", "Hello"]
    assert answer["choices"][1] == {
        "index": 1,
        "text": "Hello",
        "token_ids": [5],
        "finish_reason": "stop",
        "logprobs": [{"logprob": -0.5, "top": [[5, -0.5], [6, -1.25]]}],
    }
    assert answer["logprobs"] == answer["choices"][0]["logprobs"]


def test_penalties_bias_and_grammars_reach_the_server(radixfleet, tmp_path):
    fake = FakeInference([ANSWER])
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    options = ["--frequency-penalty", "-0.5", "--presence-penalty", "1", "--repetition-penalty", "1.25"]
    options += ["--logit-bias", "7=-100", "--logit-bias", "9=2.5", "--json-schema", str(tmp_path / "schema.json")]
    with served(fake) as address:
        code, _, err = radixfleet("generate", "-p", "Hi", *options, "--endpoint", address)
    assert (code, err) == (0, "")
    sampling = fake.requests[0].sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (-0.5, 1.0, 1.25)
    assert dict(sampling.logit_bias) == {7: -100.0, 9: 2.5}
    assert sampling.grammar.json_schema == '{"type": "object"}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logit-bias", "7"], "'7' is not ID=VALUE"),
        (["--logit-bias", "x=1"], "'x=1' is not ID=VALUE"),
        (["--json-schema", "/nowhere/schema.json"], "cannot read /nowhere/schema.json"),
    ],
)
def test_options_that_cannot_be_read_are_wrong_usage(radixfleet, options, message):
    code, _, err = radixfleet("generate", "-p", "Hi", *options)
    assert code == 2
    assert message in err


def test_two_grammars_are_refused(radixfleet):
    code, _, err = radixfleet("generate", "-p", "Hi", "--regex", "a", "--json-object")
    assert code == 4
    assert "one grammar" in err


def test_options_reach_the_server_and_what_was_not_named_stays_unset(radixfleet):
    fake = FakeInference([ANSWER])
    with served(fake) as address:
        radixfleet(
            *("generate", "--raw", "--prompt", "Hi", "--temperature", "0", "--seed", "3"),
            *("--stop", "a", "--stop", "b", "--max-new-tokens", "9", "--endpoint", address),
        )
    sampling = fake.requests[0].sampling
    assert fake.requests[0].prompt.text == "Hi"
    assert (sampling.temperature, sampling.seed, sampling.max_new_tokens) == (0, 3, 9)
    assert list(sampling.stop) == ["a", "b"]
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("ignore_eos")


def test_a_prompt_is_a_chat_unless_it_is_raw(radixfleet):
    fake = FakeInference([ANSWER])
    with served(fake) as address:
        radixfleet("generate", "--prompt", "Hi", "--system", "Be brief.", "--endpoint", address)
    messages = [(message.role, message.content) for message in fake.requests[0].prompt.chat.messages]
    assert messages == [("system", "Be brief."), ("user", "Hi")]


def test_the_prompt_may_be_the_argument(radixfleet):
    """What one writes first."""
    fake = FakeInference([ANSWER])
    with served(fake) as address:
        code, _, _ = radixfleet("generate", "Hi there", "--endpoint", address)
    assert code == 0
    assert fake.requests[0].prompt.chat.messages[0].content == "Hi there"
    code, _, err = radixfleet("explain", "Hi", "--prompt", "Ho")
    assert code == 2
    assert "give the prompt once" in err


def test_the_prompt_can_come_from_a_file(radixfleet, tmp_path):
    fake = FakeInference([ANSWER])
    (tmp_path / "prompt.txt").write_text("from a file\n")
    with served(fake) as address:
        code, _, _ = radixfleet(
            "generate", "--raw", "--prompt-file", str(tmp_path / "prompt.txt"), "--endpoint", address
        )
    assert code == 0
    assert fake.requests[0].prompt.text == "from a file\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give the prompt"),
        (["--prompt", "a", "--prompt-file", "b"], "give the prompt"),
        (["--prompt-file", "/no/such/file"], "cannot read"),
        (["--prompt", "a", "--raw", "--system", "s"], "--system belongs to --chat"),
        (["--prompt", "a", "--seed", "many"], "not a valid integer"),
        (["--prompt", "a", "--endpoint", ""], "host:port"),
        (["--prompt", "a", "--endpoint", "http://127.0.0.1:7072"], "the router's gRPC port (7070)"),
        (["--prompt-file", "/dev/null"], "/dev/null is empty: there is no prompt to send"),
        (["--raw", "--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--endpoint", "127.0.0.1:99999"], "65535"),
        (["--prompt", "a", "--endpoint", "::1:7070"], "[host]:port"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what_to_do(radixfleet, arguments, complaint):
    code, out, err = radixfleet("generate", *arguments)
    assert (code, out) == (2, "")
    assert complaint in err


def test_a_prompt_file_that_is_no_text_is_refused_by_name(radixfleet, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    code, _, err = radixfleet("generate", "--prompt-file", str(tmp_path / "picture.png"))
    assert code == 2
    assert "picture.png is not UTF-8" in err


def test_a_refused_request_is_exit_code_4(radixfleet):
    refusal = InvalidRequest("top_p must be in (0, 1]", field="sampling.top_p")
    with served(FakeInference([[refusal]])) as address:
        code, out, err = radixfleet("generate", "--prompt", "Hi", "--json", "--endpoint", address)
    assert (code, out) == (4, "")
    assert "top_p must be in (0, 1]" in err
    assert len(err.splitlines()) == 1


def test_an_unreachable_server_is_exit_code_3(radixfleet):
    with served(FakeInference([ANSWER])) as address:
        pass  # nobody listens there any more
    code, out, err = radixfleet("generate", "--prompt", "Hi", "--timeout", "0.3", "--endpoint", address)
    assert (code, out) == (3, "")
    reason, hint = err.splitlines()
    assert reason == f"radixfleet: nothing answers at {address}: Connection refused"
    assert "radixfleet up" in hint


def test_a_server_that_cannot_serve_is_exit_code_3(radixfleet):
    with served(FakeInference([[Unavailable("loading the model")]])) as address:
        code, _, err = radixfleet("generate", "--prompt", "Hi", "--timeout", "0.3", "--endpoint", address)
    assert code == 3
    assert err


def test_an_unknown_command_is_exit_code_2(radixfleet):
    code, _, err = radixfleet("genrate")
    assert code == 2
    assert "genrate" in err


def test_every_command_teaches(radixfleet):
    code, overview, _ = radixfleet("--help")
    assert code == 0
    for name, summary in command_line.COMMANDS.items():
        assert name in overview
        code, out, _ = radixfleet(name, "--help")
        assert code == 0
        assert "Usage:" in out
        assert "radixfleet" in out
        assert summary


def test_doctor_names_device_dtype_and_memory_and_has_json(radixfleet):
    code, out, _ = radixfleet("doctor", "--device", "cpu", "--device-memory", "2GiB", "--json")
    topics = {finding["topic"]: finding for finding in json.loads(out)["findings"]}
    assert code == 0
    assert "2.0 GiB" in topics["device"]["fact"]
    assert topics["dtype"]["fact"].split(",")[0] in ("bfloat16", "float32")
    assert {"CPU", "GPU", "memory", "threads", "kernels", "versions", "chunk"} <= topics.keys()


def test_doctor_says_what_it_is_at(radixfleet):
    _, _, err = radixfleet("doctor", "--device", "cpu")
    assert [line.split(" (")[0] for line in err.splitlines()] == ["loading torch", "trying device and kernels"]


def test_doctor_refuses_a_device_that_is_none(radixfleet):
    code, out, err = radixfleet("doctor", "--device", "tpu", "--json")
    assert (code, out) == (2, "")
    assert "use auto, cpu, cuda or cuda:N" in err


def test_doctor_refuses_a_size_that_is_none(radixfleet):
    code, _, err = radixfleet("doctor", "--device-memory", "lots")
    assert code == 2
    assert "8GiB" in err


def test_a_folder_that_cannot_be_made_is_one_line(radixfleet):
    code, out, err = radixfleet("monitoring", "/proc/x")
    assert (code, out) == (1, "")
    assert err.startswith("radixfleet: ")
    assert err.count("\n") == 1
    assert "/proc/x" in err


def test_up_names_a_wrong_setting_before_anything_starts(radixfleet):
    code, _, err = radixfleet("up", "--model", "demo", "--page-size", "7")
    assert code == 2
    assert "--page-size must divide 64" in err


def test_workers_shows_what_an_operator_should_change(radixfleet, monkeypatch):
    """Behaviour 62: below the tables, a line for each shortage of memory."""
    short = fleet_pb2.WorkerEntry(worker_id="w7", address="h:1", info={"advice": ["Run fewer at once."]})

    async def listed(_):
        return [worker_entry(short), worker_entry(fleet_pb2.WorkerEntry(worker_id="w8", address="h:2"))]

    monkeypatch.setattr("deploy.commands.workers._workers", listed)
    code, out, _ = radixfleet("workers")
    assert code == 0
    assert out.rstrip().endswith("w7: Run fewer at once.")
    code, out, _ = radixfleet("workers", "--json")
    assert [entry["info"]["advice"] for entry in json.loads(out)["workers"]] == [["Run fewer at once."], []]


def test_brackets_are_printed_as_they_are(radixfleet, monkeypatch):
    """Rich takes them for markup, and then they vanish, or are an error: of IPv6 addresses, names, extras of pip."""
    advice = "pip install 'radixfleet[gpu]'"
    worker = fleet_pb2.WorkerEntry(worker_id="[/w7]", address="[fd00::7]:7080", info={"advice": [advice]})

    async def listed(_):
        return [worker_entry(worker)]

    monkeypatch.setattr("deploy.commands.workers._workers", listed)
    code, out, _ = radixfleet("workers")
    assert code == 0
    assert out.splitlines()[1].split()[:2] == ["[/w7]", "[fd00::7]:7080"]
    assert f"[/w7]: {advice}" in out
    monkeypatch.setattr("deploy.doctor.inspection.inspect", lambda *_: [Finding("attention", "sdpa", advice)])
    code, out, _ = radixfleet("doctor")
    assert (code, out.split()) == (0, ["attention", "sdpa", "->", *advice.split()])


def test_watched_workers_are_printed_again_only_when_something_of_them_is_different(radixfleet, monkeypatch):
    """A report also comes when only the fleet's own figures are, and as a sign of life."""
    workers = [worker_entry(fleet_pb2.WorkerEntry(worker_id="w1", connected=connected)) for connected in (False, True)]
    fleet = fleet_state(fleet_pb2.FleetState())

    async def watch_fleet(_):
        for number in (0, 0, 1, 1, 1, 0):
            yield FleetReport(fleet, (workers[number],))
        raise Unavailable("the router stops")

    monkeypatch.setattr("deploy.commands.workers.Client.watch_fleet", watch_fleet)
    code, out, err = radixfleet("workers", "--watch", "--json")
    assert (code, err) == (3, "radixfleet: the router stops\n")
    assert [json.loads(line)["workers"][0]["connected"] for line in out.splitlines()] == [False, True, False]


def test_a_narrow_terminal_costs_no_number_of_a_worker(radixfleet, monkeypatch):
    """Engines have long names; the numbers beside them are what people look for."""
    engine = fleet_pb2.WorkerEntry(
        worker_id="openai@inference.example:18100#organisation/model",
        address="https://inference.example:18100/v1#organisation/model",
        info={"model": {"model": "organisation/model"}, "capacity": {"kv_tokens": 262144}},
    )

    async def listed(_):
        return [worker_entry(engine)]

    monkeypatch.setattr("deploy.commands.workers._workers", listed)
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = radixfleet("workers")
    assert "…" not in out
    row = next(line for line in out.splitlines() if line.startswith(engine.worker_id))
    assert row.split()[1:] == [engine.address, "disconnected", "organisation/model", "0", "0", "0", "0", "262144"]


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (Unauthenticated("a key is needed here: send it as `authorization: Bearer KEY`"), "--api-key @FILE"),
        (Unavailable("connections: Failed parsing HTTP/2 (expected SETTINGS)"), "gRPC port"),
        (Unavailable("nothing answers at 127.0.0.1:7070: Connection refused"), "radixfleet up"),
        (Unavailable("Cannot check peer: missing selected ALPN property."), "gRPC port"),
        (Unavailable("ipv4:127.0.0.1:1: Socket closed"), "--tls-client-ca signed"),
        (Unavailable("SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed"), "its own --tls-ca"),
        (Unavailable("UNAUTHENTICATED: Hostname Verification Check failed."), "--tls-peer-name"),
        (Unavailable("SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER"), "speaks no TLS"),
        (Unavailable("connection attempt timed out before receiving SETTINGS frame"), "is the process stopped"),
        (Unavailable("ipv4:127.0.0.1:1: tcp handshaker shutdown"), "is the process stopped"),
    ],
)
def test_what_grpc_does_not_say_is_said_beside_it(radixfleet, failure, hint):
    with served(FakeInference([[failure]])) as address:
        _, _, err = radixfleet("generate", "--prompt", "Hi", "--timeout", "0.3", "--endpoint", address)
    assert str(failure) in err
    assert hint in err
    assert err.count("\n") == 2, "one hint, and not another that contradicts it"


def test_a_connection_that_broke_in_mid_answer_is_not_asked_for_tls(radixfleet):
    broken = Unavailable("the connection broke after 3 tokens (Socket closed)", delivered_tokens="3")
    with served(FakeInference([[broken]])) as address:
        code, _, err = radixfleet("generate", "Hi", "--timeout", "0.3", "--endpoint", address)
    assert code == 3
    assert "broke after 3 tokens" in err
    assert "--tls-ca" not in err


def test_a_terminal_that_cannot_show_a_sign_gets_a_question_mark(tmp_path):
    """`top`'s bars, and answers in any script, in a locale of another century."""
    script = "from deploy import command_line as it; it._run = lambda: print('\\u2588'); it.run()"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=True
    )
    assert done.stdout == b"?\n"


def test_what_is_typed_and_is_no_text_is_read_all_the_same():
    """`chat` reads lines, and a pasted one may hold anything."""
    script = "from deploy import command_line as it; it._run = lambda: print(input()); it.run()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        input=b"a\xff\n",
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == "a\ufffd\n"


def test_a_closed_standard_input_is_an_empty_one():
    script = "import sys; from deploy import command_line as it; it._run = lambda: print([sys.stdin.read()]); it.run()"
    done = subprocess.run(
        ["bash", "-c", 'exec "$0" -c "$1" <&-', sys.executable, script], capture_output=True, check=True
    )
    assert done.stdout == b"['']\n"


def test_a_command_that_is_nearly_one_is_answered_with_it(radixfleet):
    code, _, err = radixfleet("generat")
    assert code == 2
    assert "did you mean 'generate'?" in err


def test_an_answer_that_breaks_off_leaves_the_error_a_line_of_its_own(radixfleet):
    fake = FakeInference([[started(), delta(5, text="Hel"), Unavailable("the engine died")]])
    with served(fake) as address:
        code, out, err = radixfleet("generate", "Hi", "--timeout", "5", "--endpoint", address)
    assert code == 3
    assert out == "Hel\n"
    assert "the engine died" in err
