"""Logs and metrics, declared in one place. Knows no service."""
