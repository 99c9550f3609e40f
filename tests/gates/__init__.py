"""Gates: what an operator relies on, tried on a whole server. `python -m tests.gates` runs them."""
