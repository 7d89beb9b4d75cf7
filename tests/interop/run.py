"""Other people's clients against a live fleet: `python -m tests.interop.run [NAME ...]`.

    python -m tests.interop.run --list             which there are
    python -m tests.interop.run openai-node k6     two of them
    python -m tests.interop.run                    all
    python -m tests.interop.run grpc-js --silence 300   streams that are silent for five minutes

Each client has an environment of its own, made at its first run from PyPI or npm under --environments (about 3 GB for
all) and kept. A fleet of simulated workers is started for the run. Not part of the test suite: it installs packages,
and takes minutes. Prints a table in Markdown; exit code 1 when a client failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.interop.case import Case, Context, Failed
from tests.interop.cases import CASES
from tests.interop.fleet import live_fleet


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; default: all")
    parser.add_argument("--list", action="store_true", help="say which cases there are")
    parser.add_argument("--silence", type=int, default=20, metavar="S", help="seconds of silence in streams [20]")
    default = Path.home() / ".cache" / "radixfleet" / "interop"
    parser.add_argument("--environments", type=Path, default=default, help=f"where clients are installed [{default}]")
    arguments = parser.parse_args()
    if arguments.list:
        for case in CASES.values():
            print(f"{case.name:14} {case.client}: {case.what}")
        return 0
    unknown = [name for name in arguments.names if name not in CASES]
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    chosen = [CASES[name] for name in arguments.names] or list(CASES.values())
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-interop-"))
    print(f"logs and results: {folder}", file=sys.stderr)
    rows, has_failed = [], False
    with live_fleet(folder) as fleet:
        for case in chosen:
            output = folder / case.name
            output.mkdir()
            context = Context(fleet, arguments.environments, output, arguments.silence)
            passed, remark = _try(case, context)
            has_failed |= not passed
            rows.append(
                f"| {case.client} | {case.what} | {'passed' if passed else 'FAILED'}{remark and f'; {remark}'} |"
            )
    print("| client | what was run | result |\n|---|---|---|")
    print("\n".join(rows))
    return int(has_failed)


def _try(case: Case, context: Context) -> tuple[bool, str]:
    missing = [command for command in case.needs if shutil.which(command) is None]
    if missing:
        return False, f"{', '.join(missing)} is not installed"
    print(f"{case.name}: running", file=sys.stderr, flush=True)
    began_s = time.monotonic()
    try:
        remark = case.run(context)
    except Exception as error:  # noqa: BLE001  an answer that is nothing like it should be; the other clients still run
        failure = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        print(f"{case.name}: FAILED: {failure}", file=sys.stderr, flush=True)
        return False, failure.splitlines()[0]
    print(f"{case.name}: passed in {time.monotonic() - began_s:.0f} s. {remark}", file=sys.stderr, flush=True)
    return True, remark


if __name__ == "__main__":
    sys.exit(main())
