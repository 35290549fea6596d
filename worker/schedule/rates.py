"""What a replica learns of its own pace from measured steps. Pure: seconds come from outside."""

# Weight that one observation leaves to all earlier ones.
_KEEP = 0.9
# A step costs something whatever is in it, so a few ids say nothing of the pace. A rate learned
# from a start-up test alone would be far too low, and routers would send nothing to change it.
_ENOUGH_TOKENS = 64


class Rates:
    """Prefill ids a second and seconds of a step that only decodes; 0 until learned."""

    def __init__(self) -> None:
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._seen_tokens = 0
        self.decode_step_s = 0.0

    def __repr__(self) -> str:
        return f"<Rates prefill={self.prefill_rate:.0f}/s decode_step={self.decode_step_s:.4f}s>"

    @property
    def prefill_rate(self) -> float:
        """Prompt ids a second. A ratio of decayed sums, so short prefills weigh little."""
        known = self._seen_tokens >= _ENOUGH_TOKENS and self._prefill_s > 0
        return self._prefill_tokens / self._prefill_s if known else 0.0

    def observe(self, *, prefill_tokens: int, decode_rows: int, seconds: float) -> None:
        """Take one step's measure."""
        self._seen_tokens += prefill_tokens
        if prefill_tokens:
            spent = seconds - (self.decode_step_s if decode_rows else 0.0)
            self._prefill_tokens = _KEEP * self._prefill_tokens + prefill_tokens
            # A step is never all decode: keep a tenth of it, or noise makes the rate infinite.
            self._prefill_s = _KEEP * self._prefill_s + max(spent, 0.1 * seconds)
        elif decode_rows:
            known = self.decode_step_s
            self.decode_step_s = _KEEP * known + (1 - _KEEP) * seconds if known else seconds
