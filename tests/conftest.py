"""Settings that every test shares."""

from hypothesis import settings

# `make test` draws the same examples each time, so that a red run is about the change; `make fuzz` draws new ones.
# No deadline: the first call in a process pays for warming up.
settings.register_profile("test", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=5_000, print_blob=True)
settings.load_profile("test")
