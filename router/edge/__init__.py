"""router.edge."""
