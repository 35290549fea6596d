"""tokenizer_svc service."""
