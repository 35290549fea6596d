"""Draws a run: a panel for each figure, a group of bars for each load or workload."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.replay.job import ReplayError

PANELS = (
    ("ttft_mean_s", "mean time to first token, s"),
    ("ttft_p99_s", "99 % time to first token, s"),
    ("hit", "share of prompt ids found"),
    ("imbalance", "busiest worker / mean"),
)


def draw(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write a picture of the rows, in the format that the path's ending says.

    Raises:
        ReplayError: matplotlib is not installed, or the file can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReplayError("--plot needs matplotlib, which the extra `dev` brings") from error
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    for axis, (key, title) in zip(axes.flat, PANELS, strict=True):
        _bars(axis, rows, key)
        axis.set_title(title)
        if key.startswith("ttft"):
            axis.set_yscale("log")
    axes.flat[0].legend(fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ReplayError(f"the plot can't be written: {error}") from error


def _bars(axis: object, rows: Sequence[Mapping[str, object]], key: str) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    groups = list(dict.fromkeys(f"{row['workload']} {row['load']}" for row in rows))
    policies = list(dict.fromkeys(str(row["policy"]) for row in rows))
    width = 0.8 / len(policies)
    for index, policy in enumerate(policies):
        found = {
            f"{row['workload']} {row['load']}": float(str(row[key]))
            for row in rows
            if row["policy"] == policy
        }
        places = [groups.index(group) + index * width for group in found]
        axis.bar(places, list(found.values()), width, label=policy)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], groups)
