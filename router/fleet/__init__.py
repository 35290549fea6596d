"""router.fleet."""
