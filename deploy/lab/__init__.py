"""The policy lab: the router's real policies and the worker's real scheduler in virtual time, without a GPU."""
