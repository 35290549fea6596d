"""router.tree."""
