"""Settings that must be there before any test imports torch."""

import os

# torch's OpenMP threads wait for each other by spinning. Where tests share their cores with anything else, a thread
# spins while the one it waits for cannot run, and a test takes four times as long. The engine process sets the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
