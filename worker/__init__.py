"""worker service."""
