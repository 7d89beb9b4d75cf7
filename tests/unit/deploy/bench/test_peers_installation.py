"""The comparison with peers: their environments, and what is said of those that are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from deploy.bench.peers import environments, llama_cpp
from deploy.bench.peers.catalog import PEERS, Launch, Peer
from deploy.bench.peers.environments import InstallFailed, environment, has_steps, logged, requirements
from deploy.bench.peers.installation import install, missing
from deploy.commands.bench import bench

HARMLESS, WRONG = ("--help",), ("--no-such-option",)
"""Arguments of `pip install` that need no network."""


class FakeInstallation:
    """Installed by a file."""

    def __init__(self, *, error: str = "") -> None:
        self.error = error

    def peer(self) -> Peer:
        return Peer("fake 1.0", "fake", lambda folder: (folder / "done").exists(), self.install, lambda *_: Launch([]))

    def install(self, folder: Path, tell: object) -> None:
        if self.error:
            raise InstallFailed(self.error)
        folder.mkdir(parents=True)
        (folder / "done").touch()


class TestInstallation:
    """One after another."""

    def test_what_is_missing_is_installed_and_a_failure_does_not_stop_the_others(self, tmp_path: Path) -> None:
        peers = {"bad": FakeInstallation(error="no compiler").peer(), "good": FakeInstallation().peer()}
        told: list[str] = []
        assert missing(["bad", "good"], tmp_path, peers) == ["bad", "good"]
        assert install(["bad", "good"], tmp_path, told.append, peers) == {"bad": "no compiler"}
        assert told[0] == "bad: no compiler"
        assert missing(["good"], tmp_path, peers) == []

    def test_no_peer_is_installed_in_an_empty_folder(self, tmp_path: Path) -> None:
        assert missing(list(PEERS), tmp_path) == list(PEERS)


class TestEnvironments:
    """Made once, step by step."""

    def test_steps_are_noted_and_one_that_failed_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(environments, "_TELL_EVERY_S", 3600.0)  # what a slow machine would be told in between
        folder = tmp_path / "environment"
        told: list[str] = []
        with pytest.raises(InstallFailed, match=r"(?s)step 2 of 2: exit code 2; the end of .*no such option"):
            environment(folder, HARMLESS, WRONG, tell=told.append)
        assert has_steps(folder, HARMLESS)
        assert not has_steps(folder, HARMLESS, WRONG)
        told.clear()
        python = environment(folder, HARMLESS, HARMLESS, tell=told.append)
        assert python.exists()
        assert told == ["installing, step 2 of 2"], "the first is not done again"
        told.clear()
        assert environment(folder, HARMLESS, HARMLESS, tell=told.append) == python
        assert not told

    def test_the_requirements_of_a_package_less_some(self) -> None:
        lines = requirements(Path(sys.executable), "aiohttp", ("yarl",))
        assert any(line.startswith("multidict") for line in lines)
        assert not any(line.startswith("yarl") or "extra ==" in line for line in lines)

    def test_a_command_that_fails_shows_its_last_lines(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", "print('first'); raise SystemExit('no space')"]
        with pytest.raises(InstallFailed, match=r"(?s)compiling: exit code 1; .*first\n  no space"):
            logged(command, tmp_path / "log", lambda text: None, "compiling")

    def test_who_breaks_off_leaves_no_compiler_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environments, "_TELL_EVERY_S", 0.05)
        compilers: list[psutil.Process] = []

        def tell(text: str) -> None:
            last = text.rpartition(" ")[2]
            if last.isdigit():
                compilers.append(psutil.Process(int(last)))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            logged(["sh", "-c", "sleep 1000 & echo $!; wait"], tmp_path / "log", tell, "compiling")
        gone, alive = psutil.wait_procs(compilers, timeout=30)
        assert (len(gone), len(alive)) == (1, 0)


class TestLlamaCpp:
    """Compiled for the machine as it is, and not as it says it is."""

    @pytest.mark.parametrize(("probe_ends_with", "amx"), [(0, True), (1, False)])
    def test_a_matrix_unit_that_cannot_be_used_is_left_out(
        self, tmp_path: Path, probe_ends_with: int, *, amx: bool
    ) -> None:
        compiler = tmp_path / "c++"
        compiler.write_text(f"#!/bin/sh\nprintf '#!/bin/sh\\nexit {probe_ends_with}\\n' >$2\nchmod +x $2\n")
        compiler.chmod(0o755)
        assert llama_cpp.flags(str(compiler), tmp_path) == (
            [] if amx else [f"-DCMAKE_{x}_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" for x in ("C", "CXX")]
        )

    def test_a_compiler_that_knows_no_such_unit(self, tmp_path: Path) -> None:
        assert llama_cpp.flags("/bin/false", tmp_path) == []


class TestCommand:
    """`radixfleet bench engine --peers`."""

    def test_missing_peers_are_named_with_what_installs_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RADIXFLEET_CACHE", str(tmp_path))
        outcome = CliRunner().invoke(bench, ["engine", "--peers", "vllm,transformers"])
        assert outcome.exit_code == 1
        assert "not installed: vllm, transformers" in outcome.output
        assert "radixfleet bench engine --peers vllm,transformers --install" in outcome.output
        assert "nobody to compare with" in outcome.output

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [(["--peers", "vllm,other"], "no peer is called 'other'"), (["--install"], "give that, too")],
    )
    def test_wrong_options(self, arguments: list[str], why: str) -> None:
        outcome = CliRunner().invoke(bench, ["engine", *arguments])
        assert outcome.exit_code == 2
        assert why in outcome.output

    def test_the_help_names_all_peers(self) -> None:
        said = " ".join(CliRunner().invoke(bench, ["engine", "--help"]).output.split())
        assert all(name in said for name in PEERS)
