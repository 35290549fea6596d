"""Who is in the fleet: sources that list members, and what becomes of the differences."""
