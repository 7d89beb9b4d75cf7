"""The committed protobuf code is what the .proto files say, and the versions it demands are the ones we ask for."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
GENERATED = REPOSITORY / "proto/radixfleet/v1"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "proto/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = tmp_path_factory.mktemp("generated")
    module.generate(root)
    return root / "radixfleet/v1"


def generated_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name.endswith(SUFFIXES)}


def test_committed_code_is_fresh(fresh):
    assert generated_files(GENERATED) == generated_files(fresh), "run `make proto` and commit the result"


def test_every_proto_has_its_code(fresh):
    expected = {path.stem + suffix for path in GENERATED.glob("*.proto") for suffix in SUFFIXES}
    assert set(generated_files(fresh)) == expected
    assert len(expected) >= 12


def test_the_least_versions_are_those_that_the_code_demands():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    ranges = {Requirement(text).name: Requirement(text).specifier for text in project["dependencies"]}
    stubs = (GENERATED / "inference_pb2_grpc.py").read_text()
    grpcio = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stubs)[1]
    messages = (GENERATED / "inference_pb2.py").read_text()
    protobuf = re.search(r"Protobuf Python Version: ([\d.]+)", messages)[1]
    assert f">={grpcio}" in str(ranges["grpcio"]).split(",")
    assert f">={protobuf}" in str(ranges["protobuf"]).split(",")
