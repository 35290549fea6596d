"""worker.group."""
