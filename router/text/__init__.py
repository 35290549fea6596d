"""Tokenizers and detokenizers as the router sees them: pools of links, any instance will do."""
