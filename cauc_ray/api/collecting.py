"""Collect every model's logits on a labelled dataset: the Python side of `cauc collect`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from cauc_ray.api.evaluated import estimate
from cauc_ray.api.online import require_usable
from cauc_ray.api.options import Common, EncoderName, Names, OnRay, Options, Pairs, Seed, options_of
from cauc_ray.api.summaries import CollectSummary
from cauc_ray.data.datasets import Dataset, DatasetSpec, open_dataset
from cauc_ray.data.kept import keep_columns
from cauc_ray.data.writing import PoolModel, TableInfo, read_info, write_info
from cauc_ray.errors import ConfigError, OptionError, explain, unknown_name, warn
from cauc_ray.execution.commits import Totals, add_totals
from cauc_ray.execution.progress import RunProgress, StageProgress
from cauc_ray.files.documents import require_folder
from cauc_ray.files.paths import AnyPath, absolute, hive_values
from cauc_ray.models.answers import EMBEDDING
from cauc_ray.models.costs import MEASURED_UNIT, cost_far_off, cost_unit
from cauc_ray.models.encoders import FeaturesSpec, ImageEncoderSpec, TextEncoderSpec
from cauc_ray.models.pool import Pool, StageSpec, load_pool
from cauc_ray.models.prompts import LanguageSpec
from cauc_ray.numbers.intervals import share
from cauc_ray.numbers.logits import joint_kind

if TYPE_CHECKING:
    from cauc_ray.execution.collection import Collection


def collect(
    pool: str | AnyPath | Pool,
    dataset: str | AnyPath,
    output: str | AnyPath,
    *,
    split: Common[str | None] = None,
    models: Common[Annotated[Names, Field(min_length=1)] | None] = None,
    columns: Common[Pairs | None] = None,
    skip_unknown_labels: bool = False,
    embedding: EncoderName | None = None,
    keep: Names = (),
    seed: Seed = 0,
    address: OnRay[str | None] = None,
    on_progress: Callable[[Mapping[str, RunProgress]], None] = lambda progress: None,
) -> CollectSummary:
    """Save the logits of a pool's models on a labelled dataset in a logit table, on Ray.

    Args:
        pool: A pool file. In Python also a Pool.
        dataset: A benchmark by name, NAME=PATH for its files, or a file or folder of tables or images, by path or URI.
        output: The table, by path or URI, new or to add to: rows and models that it has are not collected again.
        split: One of the dataset's splits, or all for every row of every file (default: calibration, validation and
            test).
        models: Names of models of the pool (default: all).
        columns: The data's own names for example_id, label, image, question, choices (a+b+c for several), context and
            other columns that models read, as image=jpeg.
        skip_unknown_labels: Leave out rows whose label is not one of the pool's, with a warning.
        embedding: Encoder whose embeddings are collected instead of logits: a stage of the pool for the input of its
            last layer, or the hub id or folder of a sentence or vision encoder.
        keep: Columns of the data that the table keeps, to evaluate, check and certify by their values.
        seed: Seed of the splits.
        address: Address of a Ray cluster (default: RAY_ADDRESS, else a session of this machine).
        on_progress: Called with the state of the collection as it goes on.

    Returns:
        A summary. Rows that a model cannot answer are in output/failed.

    Raises:
        CaucError: for the pool, the dataset or the table, and where models end.
    """
    started = time.perf_counter()
    options = options_of(collect).of(locals())
    from cauc_ray.execution.collection import plan_collection, run_side_by_side  # Ray takes seconds to import
    from cauc_ray.execution.session import ray_session, runs_here

    pool = pool if isinstance(pool, Pool) else load_pool(pool)
    spec = DatasetSpec(
        str(dataset),
        pool.task,
        options.columns or {},
        options.seed,
        pool.label_names,
        pool.columns_read(pool.stages),
        skip_unknown_labels,
        options.keep,
        pool.rule,
    )
    rows = open_dataset(spec, split)
    splits = (split,) if split is not None else tuple(rows.split_sizes)
    sizes = {name: rows.split_sizes[name] for name in splits}
    table = absolute(output)
    require_folder(table)
    works = _works(pool, options, table, rows, sizes)
    if options.keep:
        keep_columns(table, rows, sizes)
    require_usable([work.stage for work in works.values()], rows.columns, rows.name, pool, runs_here(address))
    if embedding is None:
        _require_one_unit([work.stage for work in works.values()], table)
    plans = {name: plan for name, work in works.items() if (plan := plan_collection(work, rows)) is not None}
    seconds: dict[str, float] = {}

    def on_end(name: str, took_s: float) -> None:
        seconds[name] = took_s
        if embedding is None:
            _note(works[name], list(works), table, rows)

    if plans:
        at_s = time.monotonic()
        on_progress({name: RunProgress(at_s, None, 0, (StageProgress(name),)) for name in plans})
        with ray_session(address, max(plan.stages[0].resources.num_cpus for plan in plans.values())):
            run_side_by_side({name: works[name] for name in plans}, rows, on_progress, on_end)
    for name, work in works.items():
        if embedding is None and name not in plans:
            _note(work, list(works), table, rows)
    summary = {
        "logits": str(table),
        "dataset": rows.name,
        "rule": rows.rule,
        "splits": sizes,
        "cost_unit": None if embedding is not None else _unit(next(iter(works.values()))),
        "models": [
            _summary(name, work, sum(sizes.values()) - plans[name].n_done if name in plans else 0, seconds.get(name))
            for name, work in works.items()
        ],
        "elapsed_s": time.perf_counter() - started,
    }
    return CollectSummary(summary)


def _works(
    pool: Pool, options: Options, out: AnyPath, rows: Dataset, sizes: Mapping[str, int]
) -> dict[str, Collection]:
    from cauc_ray.execution.collection import Collection, CollectRecord

    kind: Literal["model", "embedding"] = "model" if options.embedding is None else "embedding"
    if options.embedding is None:
        logits = tuple(stage.name for stage in pool.stages if stage.model.answers_kind != EMBEDDING)
        stages = pool.chain(options.models or logits)
        encoder = next((stage.name for stage in stages if stage.name not in logits), None)
        if encoder is not None:
            raise ConfigError(f"stage {encoder!r} is an encoder: collect its embeddings with embedding={encoder}")
    elif options.models is None:
        stages = (_encoder(pool, options.embedding),)
    else:
        raise OptionError("an embedding is collected for all models at once; leave {models} out")
    about: dict[str, Any] = {"dataset": rows.name, "rule": rows.rule, "fingerprint": rows.fingerprint}
    works = {}
    for stage in stages:
        of_model = {**about, "model": stage.model.identity}
        records = {split: CollectRecord(split=split, n_rows=n, **of_model) for split, n in sizes.items()}
        works[stage.name] = Collection(out, kind, stage, records, pool.columns_read([stage]))
    return works


def _encoder(pool: Pool, embedding: str) -> StageSpec:
    """Return an encoder as a stage: one of the pool's up to its last layer, or a model by hub id or folder."""
    names = [stage.name for stage in pool.stages]
    if embedding in names:
        stage = pool.stage(embedding)
        if stage.model.answers_kind == EMBEDDING:
            return stage
        return stage.model_copy(update={"model": FeaturesSpec(of=stage.model), "cost": None})
    current_folder = Path.cwd()
    # os.path.exists, unlike Path's, is False where a name is too long.
    if not embedding or not (os.path.exists(current_folder / embedding) or "/" in embedding):
        raise ConfigError(f"{unknown_name('encoder', embedding, names)}, or a hub id ORG/NAME or a folder")
    images = pool.task == "image-classification"
    kind = ImageEncoderSpec if images else TextEncoderSpec
    try:
        encoder = kind.model_validate({"model": embedding}, context={"folder": current_folder})
    except ValidationError as error:
        raise ConfigError(f"embedding {embedding!r}: {explain(error)}") from error
    language = [stage.model.columns_read.names for stage in pool.stages if isinstance(stage.model, LanguageSpec)]
    prompted = next(iter(language), None)
    if isinstance(encoder, TextEncoderSpec) and pool.task == "classification" and prompted:
        encoder = encoder.model_copy(update={"columns": tuple(sorted(prompted)), "required": ()})
    name = Path(os.path.normpath(current_folder / embedding)).name.replace("=", "-")  # of a link, its own
    if name in names:  # in the table it would be the stage, whose call is paid by who looks at it
        raise ConfigError(f"encoder {embedding!r} and a stage of the pool are both named {name!r}; rename one of them")
    try:
        stage = StageSpec(name=name, model=pool.stages[0].model, batch_size=64)
    except ValidationError as error:
        raise ConfigError(f"encoder {embedding!r}: {explain(error)}") from error
    return stage.model_copy(update={"model": encoder})


def _require_one_unit(stages: Sequence[StageSpec], out: AnyPath) -> None:
    """Refuse costs in several units, and ones in another unit than the table's."""
    for stage in stages:
        reported_unit = stage.model.cost_unit
        if stage.cost is not None and reported_unit is not None and stage.cost.value is None:
            raise ConfigError(
                f"stage {stage.name!r}: its calls report their cost in {reported_unit}; leave its cost out"
            )
    # What a remote model reports is known once it has answered.
    units = {stage.name: cost_unit(stage) for stage in stages if stage.cost is not None or not stage.model.REMOTE}
    if not units:
        return
    first, unit = next(iter(units.items()))
    for name, stage_unit in units.items():
        if stage_unit != unit:
            raise ConfigError(
                f"costs must be in one unit: stage {first!r} has {unit}, stage {name!r} has {stage_unit}; "
                "declare all in one under `cost` in the pool file"
            )
    info = _info(out)
    if info is not None and info.models and info.cost_unit != unit:
        raise ConfigError(f"{out} holds costs in {info.cost_unit}, this pool gives {unit}; choose another output")


def _info(out: AnyPath) -> TableInfo | None:
    """Return what a table declares of its models, None where it has none."""
    return read_info(out) if (out / "pool.json").is_file() and hive_values(out, "model") else None


def _note(work: Collection, order: Sequence[str], out: AnyPath, rows: Dataset) -> None:
    """Write into the table's pool.json what a collected model is and costs.

    order: the pool's models, which come in their order, after those that the table had from elsewhere.
    """
    name = work.name
    splits = [split for split in work.records if work.record(split) is not None]
    record = work.record(splits[0])
    assert record is not None
    per_call = _mean_cost(work, _totals(work, splits))
    cost = record.cost(work.stage, per_call)
    assert cost is not None  # the first call has been asked
    unit = _unit(work)
    if unit == MEASURED_UNIT:
        far = cost_far_off(name, cost, record.gflops_measured)
        if far is not None:
            warn(far)
    before = _info(out)
    if before is not None and before.cost_unit != unit and any(model.name != name for model in before.models):
        raise ConfigError(
            f"the costs of model {name!r} are in {unit}, {out} holds costs in {before.cost_unit}; give all stages "
            "costs in one unit in the pool file, and collect again: what is there is not asked for twice"
        )
    kind = work.stage.model.answers_kind
    source = f"{record.source}; {record.logit_kind}"
    declared = PoolModel(name=name, cost=cost, source=source, logit_kind=kind, dtype=record.dtype, noise=record.noise)
    answer_format = work.stage.model.answer_format
    asked = {"rule": answer_format.rule, "confidences": list(answer_format.confidences)} if answer_format else {}
    models = [declared.model_copy(update={"prompt": work.stage.model.shown, **asked})]
    for model in before.models if before else []:
        if before is not None and model.name != name:
            models.append(model.model_copy(update={"logit_kind": before.kind(model.name) or "raw"}))
    info = TableInfo(
        cost_unit=unit,
        logit_kind=joint_kind([model.logit_kind or "raw" for model in models]),
        note=f"collected on {rows.name}: {rows.rule}",
        labels=list(rows.spec.labels) if rows.spec.labels else before.labels if before else None,
        models=sorted(models, key=lambda model: order.index(model.name) if model.name in order else -1),
    )
    write_info(out, info)


def _unit(work: Collection) -> str:
    """Return the unit of a collected model's costs."""
    records = [work.record(split) for split in work.records]
    return cost_unit(work.stage, next((record.cost_unit for record in records if record and record.cost_unit), None))


def _totals(work: Collection, splits: Iterable[str]) -> Totals:
    """Return what the rows of some splits add up to."""
    totals: Totals = {what: Counter() for what in ("rows", "failed", "counts")}
    for split in splits:
        add_totals(totals, work.parts(split).committed().totals)
    return totals


def _mean_cost(work: Collection, totals: Totals) -> float | None:
    """Return the mean of what the calls themselves cost, None where the pool has the cost or they did not say."""
    rows = totals["rows"]
    return rows["cost"] / rows["paid"] if work.calls_report_costs and rows["paid"] else None


def _summary(name: str, work: Collection, n_new: int, seconds: float | None) -> dict[str, Any]:
    splits = {}
    for split in work.records:
        counts = _totals(work, [split])
        rows = counts["rows"]
        counted = {key: rows[key] for key in ("labelled", "right")}
        splits[split] = {"rows": rows["answered"], "failed": counts["failed"].total(), **counted}
    totals = _totals(work, work.records)
    record = work.record(next(iter(work.records)))
    assert record is not None
    summary: dict[str, Any] = {
        "name": name,
        "source": record.source,
        "n_failed": totals["failed"].total(),
        "splits": splits,
        "counts": dict(totals["counts"]),
        "rows_per_s": n_new / seconds if seconds else None,
    }
    if work.kind == "embedding":
        return summary
    labelled = totals["rows"]["labelled"]
    return summary | {
        **estimate("accuracy", share(totals["rows"]["right"], labelled) if labelled else None),
        "cost": record.cost(work.stage, _mean_cost(work, totals)),
        "measured_gflops": record.gflops_measured,
        "logit_kind": record.logit_kind,
    }
