"""TLS and mutual TLS of gRPC servers and channels, and of HTTP servers; files that change; files that are wrong."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixfleet.channel import listen, make_server, open_channel, server_options
from radixfleet.clock import ManualClock
from radixfleet.endpoint import Endpoint
from radixfleet.tls import ClientTls, ServerTls
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from radixfleet.watched_file import UnusableFile
from tests.support.certificates import Authority, Pair, private_pem
from tests.support.fake_inference import SERVICE, FakeInference

REQUEST = inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(text="ab"))


class Place:
    """A directory with a CA, a server's certificate and a client's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority("ours")
        self.ca = self.authority.write(directory, "ca")
        self.server = self.authority.issue("server", directory)
        self.client = self.authority.issue("client", directory)
        other = Authority("theirs")
        self.other_ca = other.write(directory, "other-ca")
        self.stranger = other.issue("stranger", directory)
        self.clock = ManualClock()

    def server_tls(self, *, mutual: bool = False) -> ServerTls:
        return ServerTls(self.server.cert, self.server.key, self.ca if mutual else None, self.clock)

    def client_tls(self, pair: Pair | None = None, *, ca: Path | None = None) -> ClientTls:
        return ClientTls(ca or self.ca, pair.cert if pair else None, pair.key if pair else None)

    def replace_all(self) -> None:
        """Another CA, and certificates of it, in the same files."""
        authority = Authority("next")
        authority.write(self.directory, "ca")
        authority.issue("server", self.directory)
        authority.issue("client", self.directory)
        self.clock.advance(1.0)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@asynccontextmanager
async def serving(tls: ServerTls | None, port: int = 0) -> AsyncIterator[int]:
    server, _ = await make_server([SERVICE])
    inference_pb2_grpc.add_InferenceServicer_to_server(FakeInference(), server)  # type: ignore[no-untyped-call]
    port = listen(server, "127.0.0.1", port, tls)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def call(channel: grpc.aio.Channel) -> list[int]:
    response = await inference_pb2_grpc.InferenceStub(channel).Tokenize(REQUEST, timeout=20)
    return list(response.token_ids)


async def ask(port: int, tls: ClientTls | None, host: str = "127.0.0.1") -> list[int] | str:
    """What a call gives: token ids, or the name of the status."""
    async with open_channel(Endpoint(f"{host}:{port}", tls)) as channel:
        try:
            return await call(channel)
        except grpc.aio.AioRpcError as error:
            return error.code().name


async def test_a_server_with_a_certificate_speaks_tls_alone(place: Place) -> None:
    async with serving(place.server_tls()) as port:
        assert await ask(port, place.client_tls()) == [97, 98]
        assert await ask(port, place.client_tls(), "localhost") == [97, 98]
        assert await ask(port, None) == "UNAVAILABLE"
        assert await ask(port, place.client_tls(ca=place.other_ca)) == "UNAVAILABLE"
    async with serving(None) as port:
        assert await ask(port, place.client_tls()) == "UNAVAILABLE"


async def test_mutual_tls_lets_in_who_shows_a_certificate_of_the_ca(place: Place) -> None:
    async with serving(place.server_tls(mutual=True)) as port:
        assert await ask(port, place.client_tls(place.client)) == [97, 98]
        assert await ask(port, place.client_tls()) == "UNAVAILABLE"
        assert await ask(port, place.client_tls(place.stranger)) == "UNAVAILABLE"


async def test_a_certificate_for_another_host_needs_its_name_to_be_given(place: Place) -> None:
    place.authority.issue("server", place.directory, hosts=["fleet.internal"])
    async with serving(place.server_tls()) as port:
        assert await ask(port, place.client_tls()) == "UNAVAILABLE"
        assert await ask(port, ClientTls(place.ca, peer_name="fleet.internal")) == [97, 98]
        assert await ask(port, ClientTls(place.ca, peer_name="other.internal")) == "UNAVAILABLE"


async def test_a_server_takes_up_new_certificates_and_standing_connections_go_on(place: Place) -> None:
    before = place.client_tls(place.client).credentials()
    async with serving(place.server_tls(mutual=True)) as port:
        standing = grpc.aio.secure_channel(f"127.0.0.1:{port}", before)
        assert await call(standing) == [97, 98]
        place.replace_all()
        assert await ask(port, place.client_tls(place.client)) == [97, 98]
        assert await call(standing) == [97, 98]
        await standing.close()
        apart = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", before, options=apart) as late:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(late)


async def test_a_channel_takes_up_new_certificates_for_calls_that_begin_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router and its workers outlive their certificates: the old connection ends with the last call on it."""
    monkeypatch.setattr("radixfleet.watched_file.MonotonicClock", lambda: place.clock)
    async with serving(place.server_tls(mutual=True)) as port:
        channel = open_channel(Endpoint(f"127.0.0.1:{port}", place.client_tls(place.client)))
        stub = inference_pb2_grpc.InferenceStub(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        assert list((await stub.Tokenize(REQUEST)).token_ids) == [97, 98]
        place.replace_all()
        assert list((await stub.Tokenize(REQUEST)).token_ids) == [97, 98]
        assert not watch.done()  # on the old connection
    # The server that comes back knows the new CA alone, and its certificate is of the new CA.
    async with serving(place.server_tls(mutual=True), port):
        assert list((await stub.Tokenize(REQUEST, wait_for_ready=True, timeout=20)).token_ids) == [97, 98]
        await channel.close()


async def test_spoilt_files_leave_the_last_certificate_in_use(place: Place) -> None:
    async with serving(place.server_tls()) as port:
        place.server.key.write_text("spoilt")
        place.clock.advance(1.0)
        assert await ask(port, place.client_tls()) == [97, 98]


async def test_spoilt_files_leave_the_last_certificate_in_use_for_new_peers_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that registers while its router's files are wrong is dialled as the others are."""
    monkeypatch.setattr("radixfleet.watched_file.MonotonicClock", lambda: place.clock)
    tls = place.client_tls()
    async with serving(place.server_tls()) as port:
        assert await ask(port, tls) == [97, 98]
        place.ca.write_text("spoilt")
        place.clock.advance(1.0)
        assert await ask(port, tls) == [97, 98]


async def http_ask(port: int, ca: Path, pair: Pair | None = None) -> bytes:
    """What a TLS server says; empty when it hangs up."""
    context = ssl.create_default_context(cafile=ca)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_an_ssl_context_takes_up_new_certificates_and_a_new_ca_of_clients(place: Place) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    tls = place.server_tls(mutual=True)
    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls.ssl_context())
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await http_ask(port, place.ca, place.client) == b"hello"
        for pair in (None, place.stranger):
            with pytest.raises((ssl.SSLError, AssertionError)):
                assert await http_ask(port, place.ca, pair) == b"hello"
        old = place.client.cert.read_bytes(), place.client.key.read_bytes()
        place.replace_all()
        assert await http_ask(port, place.ca, place.client) == b"hello"
        place.client.cert.write_bytes(old[0])
        place.client.key.write_bytes(old[1])
        with pytest.raises((ssl.SSLError, AssertionError)):
            assert await http_ask(port, place.ca, place.client) == b"hello"


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
async def test_who_does_not_finish_the_handshake_is_hung_up_on(place: Place, sent: bytes) -> None:
    server = grpc.aio.server(options=server_options(handshake_s=0.2))
    port = listen(server, "127.0.0.1", 0, place.server_tls())
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
    await server.stop(None)


def test_wrong_files_are_named_with_what_is_wrong(place: Place) -> None:
    server, directory = place.server, place.directory
    missing = directory / "missing.pem"
    encrypted = directory / "encrypted.key"
    encrypted.write_bytes(private_pem(ec.generate_private_key(ec.SECP256R1()), b"secret"))
    rubbish = directory / "rubbish.pem"
    rubbish.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    faults = [
        ((missing, server.key, None), "cannot read .*missing"),
        ((server.cert, missing, None), "cannot read .*missing"),
        ((server.cert, place.client.key, None), "client.key does not belong to .*server.pem"),
        ((server.key, server.key, None), "server.key holds no certificate"),
        ((server.cert, server.cert, None), "server.pem holds no private key"),
        ((server.cert, encrypted, None), "encrypted.key is encrypted"),
        ((rubbish, server.key, None), "cannot use the certificate .*rubbish"),
        ((server.cert, server.key, missing), "cannot read .*missing"),
        ((server.cert, server.key, server.key), "server.key holds no CA certificate"),
        ((server.cert, server.key, rubbish), "cannot use the CA certificates in .*rubbish"),
    ]
    for files, message in faults:
        with pytest.raises(UnusableFile, match=message):
            ServerTls(*files)
    for client, message in (
        (ClientTls(missing), "cannot read .*missing"),
        (ClientTls(place.ca, server.cert), "--tls-cert needs --tls-key"),
        (ClientTls(place.ca, server.cert, place.client.key), "does not belong"),
    ):
        with pytest.raises(UnusableFile, match=message):
            client.credentials()


def test_the_cas_of_the_machine_can_be_trusted() -> None:
    if ssl.get_default_verify_paths().cafile is None:
        pytest.skip("this machine trusts no CA")
    assert ClientTls().credentials()
