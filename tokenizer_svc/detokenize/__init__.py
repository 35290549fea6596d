"""tokenizer_svc.detokenize."""
