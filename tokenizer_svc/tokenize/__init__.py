"""tokenizer_svc.tokenize."""
