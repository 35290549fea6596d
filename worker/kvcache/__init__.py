"""worker.kvcache."""
