"""The one time limit of all tests. It ends what would never end by itself; no machine is so slow or
so busy that it meets the limit. tests/support/threads.hpp and meson.build have the same."""

HANG = 3600  # seconds
