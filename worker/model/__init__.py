"""Model directories: reading weights whole or in parts, what cannot be served, converting."""
