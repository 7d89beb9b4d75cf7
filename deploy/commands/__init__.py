"""One module a subcommand of `radixfleet`; imported only when it is called, so that the command starts at once."""
