"""Settings of the whole suite."""

from hypothesis import settings

# Time limits belong to the suite's timeout: a busy machine must not fail an example that is right.
settings.register_profile("radixfleet", deadline=None)
settings.load_profile("radixfleet")
