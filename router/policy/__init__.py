"""router.policy."""
