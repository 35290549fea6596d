"""Fixtures that every test may use. Run everything with `make test`."""
