"""The `radixfleet` command's first moment: what can be done before anything else is imported."""

from __future__ import annotations

from deploy.interrupts import ending_quietly


def main() -> None:
    """Entry point. Never returns."""
    with ending_quietly():
        from deploy.command_line import run  # some 0.3 s, in which one may press Ctrl-C
    run()


if __name__ == "__main__":
    main()
