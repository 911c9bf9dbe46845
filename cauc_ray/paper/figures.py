"""All figures of a run, with the numbers that they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cauc_ray.comparison.comparing import Comparison
from cauc_ray.files.parquet import write_parquet
from cauc_ray.paper import calibration, curves, gains
from cauc_ray.paper.compared import TITLES
from cauc_ray.paper.config import ComparedChain, PaperConfig
from cauc_ray.paper.fused import gain_of
from cauc_ray.paper.measured import ModelReliability, PairMeasures
from cauc_ray.paper.plan import GAINS, RELIABILITY

Values = Mapping[tuple[str, str], Any]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure: the name of its files, its title and what it shows."""

    name: str
    title: str
    caption: str


def draw_figures(config: PaperConfig, values: Values, folder: Path) -> tuple[Drawn, ...]:
    """Draw what there are values of: name.png and name.svg, and name.parquet with its numbers."""
    return (
        *_draw_reliability(config, values, folder),
        *_draw_curves(config, values, folder),
        *_draw_gains(config, values, folder),
    )


def _draw_reliability(config: PaperConfig, values: Values, folder: Path) -> list[Drawn]:
    drawn = []
    for entry in config.figures.calibration_reliability:
        found: Mapping[str, ModelReliability] | None = values.get((RELIABILITY, entry.name))
        if found is not None:
            name = f"{RELIABILITY}-{entry.name}"
            calibration.draw_calibration(entry, found, folder / name)
            write_parquet(folder / f"{name}.parquet", pa.Table.from_pylist(_reliability_rows(found)))
            title = f"Calibration reliability and high-confidence coverage, {entry.name}"
            drawn.append(Drawn(name, title, calibration.caption(entry, found)))
    return drawn


def _draw_curves(config: PaperConfig, values: Values, folder: Path) -> list[Drawn]:
    drawn = []
    for part, title in TITLES.items():
        chains = [each for each in config.tables.by_name[part] if isinstance(each, ComparedChain)]
        found = [(chain, values[part, chain.name]) for chain in chains if (part, chain.name) in values]
        if found:
            name = f"accuracy-cost-{part}"
            curves.draw_curves(found, folder / name)
            write_parquet(folder / f"{name}.parquet", _curves_table(found))
            drawn.append(Drawn(name, f"Accuracy over cost: {title[0].lower()}{title[1:]}", curves.CAPTION))
    return drawn


def _draw_gains(config: PaperConfig, values: Values, folder: Path) -> list[Drawn]:
    names = [name for name in config.figures.complementarity_gain if (GAINS, name) in values]
    found: dict[str, list[PairMeasures]] = {name: values[GAINS, name] for name in names}
    if not any(found.values()):
        return []
    gains.draw_gains(found, folder / GAINS)
    write_parquet(folder / f"{GAINS}.parquet", pa.Table.from_pylist(_gain_rows(found)))
    return [Drawn(GAINS, "Complementarity rate against the gain of fusing", gains.caption(found))]


def _curves_table(found: Sequence[tuple[ComparedChain, Comparison]]) -> pa.Table:
    named = [
        comparison.curves.add_column(0, "chain", pa.array([chain.name] * comparison.curves.num_rows, pa.string()))
        for chain, comparison in found
    ]
    return pa.concat_tables(named)


def _gain_rows(found: Mapping[str, Sequence[PairMeasures]]) -> list[dict[str, Any]]:
    return [
        {
            "set": name,
            "first": pair.models[0],
            "last": pair.models[1],
            "complementarity_rate": pair.complementarity_rate,
            "gain_of_fusing": gain_of(pair),
        }
        for name, pairs in found.items()
        for pair in pairs
    ]


def _reliability_rows(found: Mapping[str, ModelReliability]) -> list[dict[str, Any]]:
    """Return the bins of every model, before and after."""
    return [
        {
            "model": of.model,
            "temperature": of.temperature if when == "after" else 1.0,
            "calibrated": when == "after",
            "bin_centre": float(bins.centres[place]),
            "n": int(bins.counts[place]),
            "confidence": float(bins.confidence[place]) if bins.counts[place] else None,
            "accuracy": float(bins.accuracy[place]) if bins.counts[place] else None,
            "accuracy_low": float(bins.low[place]) if bins.counts[place] else None,
            "accuracy_high": float(bins.high[place]) if bins.counts[place] else None,
            "n_high": of.n_high_after if when == "after" else of.n_high_before,
            "cost": of.cost,
        }
        for of in found.values()
        for when, bins in (("before", of.before), ("after", of.after))
        for place in range(len(bins.counts))
    ]
