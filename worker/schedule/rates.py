"""What a replica learns of its own pace from measured steps. Pure: seconds come from outside.

A step costs something whatever is in it, so ids over seconds would say more of how long
prompts are than of the machine. Learned is what one more id costs: the slope of a line
through (ids, seconds), by least squares that forget. Steps that decode as well lie on
another line with the same slope.
"""

from dataclasses import dataclass

# Weights that one observation leaves to all earlier ones.
_KEEP = 0.98
_KEEP_DECODE = 0.9
# Where prefills are all alike, no line can be told: it is drawn through the origin, as if some
# steps of nothing, this part of all, had taken no time. Where lengths differ they hardly count.
_ORIGIN = 0.01
# A step that takes longer than expected by more than this factor counts as if by this factor ...
_MOST = 2.0
# ... once something is expected, after so many of its kind.
_SURE = 4.0
# The slope is at least this part of seconds over ids, or noise makes the rate infinite.
_LEAST = 0.1
# A rate learned from a start-up test alone would be far too low, and routers would send nothing
# to change it.
_ENOUGH_TOKENS = 64


@dataclass(slots=True)
class _Sums:
    """Decayed sums over steps of one kind, of `x` ids and `y` seconds."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def decay(self) -> None:
        self.weight *= _KEEP
        self.x *= _KEEP
        self.y *= _KEEP
        self.xx *= _KEEP
        self.xy *= _KEEP

    def add(self, x: float, y: float) -> None:
        self.weight += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y

    @property
    def moments(self) -> tuple[float, float]:
        """How y varies with x, and x by itself, the steps of nothing included."""
        if not self.weight:
            return 0.0, 0.0
        whole = self.weight * (1 + _ORIGIN)
        return self.xy - self.x * self.y / whole, self.xx - self.x * self.x / whole

    def usual(self, x: float, slope: float) -> float:
        """The longest that so many ids take, by the line or by the mean."""
        line = self.y + slope * (x * self.weight - self.x)
        return max(line / self.weight, x * self.y / self.x)


class Rates:
    """Prefill ids a second and seconds of a step that only decodes; 0 until learned."""

    def __init__(self) -> None:
        self._alone = _Sums()
        self._with_decodes = _Sums()
        self._seen_tokens = 0
        self.decode_step_s = 0.0

    def __repr__(self) -> str:
        return f"<Rates prefill={self.prefill_rate:.0f}/s decode_step={self.decode_step_s:.4f}s>"

    @property
    def prefill_rate(self) -> float:
        """Prompt ids a second, without what a step costs whatever is in it."""
        slope = self._slope()
        return 1 / slope if slope and self._seen_tokens >= _ENOUGH_TOKENS else 0.0

    def observe(self, *, prefill_tokens: int, decode_rows: int, seconds: float) -> None:
        """Take one step's measure."""
        self._seen_tokens += prefill_tokens
        if prefill_tokens:
            spent = seconds - (self.decode_step_s if decode_rows else 0.0)
            # A step is never all decode.
            self._learn(
                self._with_decodes if decode_rows else self._alone,
                prefill_tokens,
                max(spent, 0.1 * seconds),
            )
        elif decode_rows:
            known = self.decode_step_s
            step_s = min(seconds, _MOST * known) if known else seconds
            self.decode_step_s += (1 - _KEEP_DECODE if known else 1.0) * (step_s - known)

    def _learn(self, sums: _Sums, tokens: int, seconds: float) -> None:
        if sums.weight >= _SURE:
            seconds = min(seconds, _MOST * sums.usual(tokens, self._slope()))
        self._alone.decay()
        self._with_decodes.decay()
        sums.add(tokens, seconds)

    def _slope(self) -> float:
        """Seconds that one more id costs; 0 when nothing was seen."""
        tokens = self._alone.x + self._with_decodes.x
        if not tokens:
            return 0.0
        (xy, xx), (more_xy, more_xx) = self._alone.moments, self._with_decodes.moments
        ratio = (self._alone.y + self._with_decodes.y) / tokens
        return max((xy + more_xy) / (xx + more_xx), _LEAST * ratio)
