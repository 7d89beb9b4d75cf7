"""What a supervisor of several router processes tells them."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from router.config import RouterSettings
from router.other_processes import Place
from router.process import packed, publish_addresses, unpacked, withdraw_addresses

PLACE = Place(Path("/run/radixfleet"), 3)
OTHERS = {
    "host": "0.0.0.0",
    "port": 0,
    "address_file": Path("there"),
    "max_message_bytes": 2 * 1024**2,
    "workers": ("10.0.0.1:7080", "http://10.0.0.2:8000#m"),
    "engine_api_key": SecretStr("sesame"),
    "tokenizers": ("m=/models/m",),
    "tls_cert": Path("fleet.pem"),
    "tls_key": Path("fleet.key"),
    "api_keys": ("keys.txt",),
    "admin_token": SecretStr("open"),
    "max_client_requests_per_s": 2.5,
    "link": False,
    "policy": "sglang",
}


@pytest.mark.parametrize("settings", [RouterSettings(), RouterSettings(**OTHERS)])
def test_settings_arrive_as_they_were_secrets_included(settings: RouterSettings) -> None:
    assert unpacked(packed(settings, PLACE)) == (settings, PLACE)


def test_addresses_are_withdrawn_with_that_of_http(tmp_path: Path) -> None:
    settings = RouterSettings(address_file=tmp_path / "address")
    publish_addresses(settings, "127.0.0.1:1", 2)
    assert len(list(tmp_path.iterdir())) == 2
    withdraw_addresses(settings, "127.0.0.1:1", 2)
    assert not list(tmp_path.iterdir())
