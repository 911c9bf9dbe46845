"""What the verbs take: one definition of names, types, defaults and meanings.

Keyword arguments are checked by it, config files are read by it, and the command's flags are made from it.
"""

from __future__ import annotations

import reprlib
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from cauc_ray.errors import ConfigError, explain, unknown_name
from cauc_ray.files.documents import read_yaml
from cauc_ray.files.paths import AnyPath, RemotePath, path_of
from cauc_ray.models.resources import Resources
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.guarantees import RiskLimit
from cauc_ray.numbers.sweep import Objective
from cauc_ray.policies.by_method import SINGLE
from cauc_ray.policies.method import METHODS, OURS
from cauc_ray.policies.threshold import Compared, ThresholdRule

# The folder into which Ray unpacks the working directory of a job, and which it removes afterwards.
_RAY_COPY = "_ray_pkg_"


@dataclass(frozen=True, slots=True)
class Flag:
    """How a flag gives a value: what stands for it in the help, how its text is read, and other spellings.

    is_positional: given by its position, not by a name.   is_several: by several positions.   config_only: too large
    for a flag.
    """

    metavar: str | None = None
    read: Callable[[str], Any] = str
    spellings: tuple[str, ...] = ()
    is_positional: bool = False
    is_several: bool = False
    config_only: bool = False


def option(about: str, default: Any = None, **limits: Any) -> Any:
    """Return the field of an option: what it means, its default (`...` where it must be given), and its limits."""
    return Field(default=default, description=about, **limits)


def several(text: str) -> tuple[str, ...] | dict[str, str]:
    """Read A,B,C, or A=X,B=Y; the values are texts, of which a type makes what it holds."""
    parts = [[each.strip() for each in part.split("=", 1)] for part in text.split(",")]
    named = {part[0]: part[-1] for part in parts if len(part) == 2}
    if not all(map(all, parts)) or len(named) not in ((len(parts),) if "=" in text else (0,)):
        raise ArgumentTypeError(f"{text!r} is not a list of values, or of NAME=VALUE, separated by commas")
    return named or tuple(name for (name,) in parts)


def several_chains(text: str) -> tuple[tuple[str, ...], ...]:
    """Read A+B,A+B+C.

    >>> several_chains("small+large,small+medium+large")
    (('small', 'large'), ('small', 'medium', 'large'))
    """
    return tuple(tuple(chain.split("+")) for chain in several(text))


def _plain(value: Any) -> Any:
    """Return arrays and other sequences as tuples, which types are checked on; a text is not a sequence here."""
    return tuple(value) if isinstance(value, np.ndarray | list) else value


def located(value: object, info: ValidationInfo) -> AnyPath:
    """Return the path that a text names: a URI as it is, else taken from the folder of the config file if any."""
    if not isinstance(value, str | Path | RemotePath):
        raise ValueError(f"a path or a URI was expected, got {value!r}")
    if not str(value):
        raise ValueError("a path is missing: it is an empty text")
    path, folder = path_of(value), _folder(info)
    return path if folder is None or isinstance(path, RemotePath) else (folder / path).resolve()


def _folder(info: ValidationInfo) -> Path | None:
    """Return the folder of the config file that an option is from, None where it is from none."""
    context = info.context or {}
    folder: Path | None = None if info.field_name in context.get("given", ()) else context.get("folder")
    return folder


def _kept(value: object, info: ValidationInfo) -> AnyPath:
    """Return the path of an output. Raises ValueError where Ray would remove it with the job's working directory."""
    path = located(value, info)
    if isinstance(path, Path) and _folder(info) is not None and any(part.startswith(_RAY_COPY) for part in path.parts):
        raise ValueError(
            f"{path.name} lies in the copy of the working directory that Ray makes for a job and removes afterwards; "
            "give an absolute path"
        )
    return path


def as_dataset(value: object, info: ValidationInfo) -> str:
    """Return a dataset's name, with the path in it taken from the config file's folder."""
    from cauc_ray.data.benchmarks import BENCHMARKS  # pyarrow, which other verbs need not have

    name, is_named, path = str(value).partition("=")
    if is_named and name in BENCHMARKS:
        return f"{name}={located(path, info)}" if path else str(value)
    return str(value) if name in BENCHMARKS or name.startswith("hub:") else str(located(value, info))


def _as_encoder(value: object, info: ValidationInfo) -> str | None:
    """Return a folder next to the config file where there is one of that name, else the name of a stage or a hub id."""
    if value is None:
        return None
    folder = _folder(info)
    if folder is None or not (folder / str(value)).exists():
        return str(value)
    return str((folder / str(value)).resolve())


_PATH = (PlainSerializer(str, when_used="json"), WithJsonSchema({"type": "string", "format": "path"}))
_PLAIN = BeforeValidator(_plain)
Location: TypeAlias = Annotated[AnyPath, PlainValidator(located), *_PATH]
OutputPath: TypeAlias = Annotated[AnyPath, PlainValidator(_kept), *_PATH]
Cost: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Amount: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Names: TypeAlias = Annotated[tuple[str, ...], _PLAIN, Flag("A,B,C", several)]
Amounts: TypeAlias = Annotated[tuple[Amount, ...], _PLAIN, Flag("X,Y,Z", several)]
Chains: TypeAlias = Annotated[
    tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...], _PLAIN, Flag("A+B,A+B+C", several_chains)
]
Seeds: TypeAlias = Annotated[tuple[Seed, ...], _PLAIN, Flag("0,1,2", several)]
Costs: TypeAlias = Annotated[dict[str, Cost] | tuple[Cost, ...], _PLAIN, Flag("X,Y,Z|A=X,…", several)]
Pairs: TypeAlias = Annotated[dict[str, str], Flag("NAME=VALUE,…", several)]
Kinds: TypeAlias = Annotated[
    str | dict[str, str], Flag("KIND|A=KIND,…", lambda text: several(text) if "=" in text else text)
]
Shards: TypeAlias = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], Flag("N|auto")]
# A share of the calibration split; or arrays: (logits, labels), or (logits, labels, example_ids).
Cut: TypeAlias = Annotated[float, Field(gt=0, lt=1), Flag("SHARE")] | tuple[Any, Any] | tuple[Any, Any, Any] | None


class Options(BaseModel):
    """Options of a verb, checked.   GROUP: what the help calls those of a class."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    GROUP: ClassVar[str] = "input and output"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Take the verb's own options out of what is given, and check them. Raises ConfigError in one line."""
        try:
            return cls.model_validate({name: given[name] for name in cls.model_fields if name in given})
        except ValidationError as error:
            fault = error.errors()[0]
            name, got = str(fault["loc"][0]), fault["input"]
            if fault["type"] == "missing":
                raise ConfigError(f"{name} is required") from error
            if len(fault["loc"]) > 1:  # within a sequence, or one of several types
                got = given[name]
            if fault["type"] == "value_error":  # our own words
                raise ConfigError(f"{name}: {fault['ctx']['error']}") from error
            message = fault["msg"]
            shown = " ".join(reprlib.repr(got).split())
            raise ConfigError(f"{name}: {message[0].lower()}{message[1:]}, got {shown}") from error

    @classmethod
    def read(cls, path: str | Path, given: Mapping[str, Any] = {}) -> Self:
        """Read options from a YAML file; those that are given as well take precedence.

        Relative paths are taken from the file's folder, those that are given from the current one. Raises ConfigError
        in one line when the file is missing, is not YAML, or has an unknown key, name or value.
        """
        content = read_yaml(Path(path), "config")
        if not isinstance(content, dict):
            keys = ", ".join(name for name, field in cls.model_fields.items() if field.is_required())
            raise ConfigError(f"{path} is not a config: a mapping with {keys} was expected")
        unknown = next((str(name) for name in content if name not in cls.model_fields), None)
        if unknown is not None:
            raise ConfigError(f"{path}: {unknown_name('key', unknown, cls.model_fields)}")
        try:
            return cls.model_validate({**content, **given}, context={"folder": Path(path).parent, "given": set(given)})
        except ValidationError as error:
            raise ConfigError(f"{path}: {explain(error)}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def part(self, kind: type[Options]) -> dict[str, Any]:
        """Return the options that are those of a kind, by name."""
        return {name: getattr(self, name) for name in kind.model_fields}


class ClusterOptions(Options):
    """Where Ray is."""

    GROUP = "Ray"
    address: str | None = option("address of a Ray cluster (default: RAY_ADDRESS, else a session started for this)")


class ShardOptions(ClusterOptions):
    """How logits that need not fit in one process are cut over a Ray cluster."""

    shards: Shards | None = option("keep the logits in this many actors on Ray, or auto for as many as it has room for")
    resources: Annotated[Resources | None, Flag(config_only=True)] = option(
        "of a shard, as in a pool file: num_cpus, labels, …"
    )
    deadline_s: float | None = option("seconds for one answer of all shards (default: an hour)", gt=0)

    @model_validator(mode="after")
    def _sharded(self) -> Self:
        if self.shards is None and (self.resources is not None or self.deadline_s is not None):
            raise ConfigError("resources and deadline_s are those of shards; give shards as well")
        return self


class ChainOptions(Options):
    """Which models are read, at what costs, and which examples are for what."""

    GROUP = "models and splits"
    models: Names | None = option("the chain, cheapest first (default: all, by cost)")
    costs: Costs | None = option("cost of one call of each model, by name or in their order (default: the table's)")
    cost_unit: str | None = option("unit of costs (default: the table's, else 'cost units')")
    calibration_split: str = option("the split to fit on", "calibration")
    validation_split: str = option("the split to choose thresholds on", "validation")
    validation: Cut = option("share of the calibration split to choose on (default: the validation split)")
    seed: Seed = option("seed of everything that is drawn at random", 0)
    logit_kind: Kinds | None = option(
        "raw, log-probabilities, probabilities or surrogate (default: as declared in the table)"
    )

    @property
    def splits(self) -> tuple[str, str]:
        """Return the names of the calibration and validation split."""
        return self.calibration_split, self.validation_split

    @property
    def cuts(self) -> dict[str, Cut]:
        """Return by name the splits that are read, the first of which is calibration.

        None for a split of its own, else a share of the first, or arrays.
        """
        return {self.calibration_split: None, self.validation_split: self.validation}

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        if self.models == ():
            raise ConfigError("models: a chain needs at least one model")
        twice = next((model for model in self.models or () if (self.models or ()).count(model) > 1), None)
        if twice is not None:
            raise ConfigError(f"models: {twice!r} is a duplicate in the chain")
        if self.calibration_split == self.validation_split:
            raise ConfigError(f"calibration and validation must be two splits, both are {self.calibration_split!r}")
        if sum(cut for cut in self.cuts.values() if isinstance(cut, float)) >= 1:
            raise ConfigError(
                "the shares of validation and test leave no example to calibrate on; their sum must be below 1"
            )
        return self


class FitOptions(ChainOptions, ShardOptions):
    """What a policy is fitted by."""

    GROUP = "fitting"
    method: str = option(
        "base, rf, stacked (RF with biases that recalibrate each model), auto (the best stacked sub-chain at a "
        "budget), single:MODEL, or a method of `cauc compare`",
        "base",
    )
    embedding: str | None = option("an encoder of the table, which methods of `cauc compare` that look at one read")
    budget: float | None = option("mean cost per example to choose the threshold for")
    threshold: float | None = option("a threshold to use as it is")
    price: float | None = option(
        "what a unit of cost is worth, in errors: the threshold is 1 less the last model's error and the price of its "
        "call; of more than two models, the last stage's error and the price of all calls after the first; of gains "
        "and stacked, what gains are compared with",
        ge=0,
        allow_inf_nan=False,
    )
    rule: Compared = option(
        "what rf compares: confidence, with one threshold; or gain, what going on is expected to gain per cost, with a "
        "price",
        "confidence",
    )
    objective: Objective = option("what a chosen threshold maximises", "accuracy")
    certify: str | None = option("limit of the risk of early answers, as risk<=0.05@0.95")
    search: bool = option("fit the best sub-chain of the models, at most 12, in any order", False)
    strict: bool = option("end with exit code 3 if a guard fires", False)
    safe: bool = option("fuse only where supported; fall back on a single model that is no worse", False)
    calibrator: CalibratorKind = option(
        "of each model: its temperature; with an offset for each option; or a map of confidences", "temperature"
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        _ = self.threshold_rule
        if self.rule == "gain" and (
            self.method not in ("rf", "stacked", "auto") or self.safe or self.shards is not None
        ):
            raise ConfigError("the rule gain is for method rf, without safe and shards; stacked always follows it")
        if not self.is_ours:
            self._require_plain()
        elif self.embedding is not None and self.method not in ("stacked", "auto"):
            raise ConfigError(f"method {self.method} looks at no embedding; leave embedding out")
        if self.searches and self.safe:
            raise ConfigError("a search measures chains without the checks of a safe policy; leave one of the two out")
        if self.searches and self.price is not None:
            raise ConfigError("a search chooses a chain by its best threshold; leave one of search and price out")
        if self.search and self.rule == "gain" and self.method == "rf":
            raise ConfigError(
                "a search compares confidences of rf: search by method stacked, or leave the rule gain out"
            )
        if self.searches and self.certify is not None:
            raise ConfigError(
                "a chain that was chosen on validation cannot be certified there; leave one of search and certify out"
            )
        if self.shards is not None and (self.searches or self.validation is not None or self.method == "stacked"):
            raise ConfigError(
                "search, stacked, and validation as a share, need all logits in one process; leave shards out"
            )
        return self

    @property
    def is_ours(self) -> bool:
        """Return whether the method is one of CAUC's own."""
        return self.method in OURS

    def _require_plain(self) -> None:
        """Raise ConfigError unless a method of the comparison can be fitted by the options."""
        if not self.method.startswith(f"{SINGLE}:") and self.method not in METHODS:
            raise ConfigError(unknown_name("method", self.method, METHODS))
        if self.method in METHODS and (why := METHODS[self.method].unpublished):
            raise ConfigError(f"method {self.method} {why}; `cauc compare` runs it")
        plain = {"search": False, "safe": False, "calibrator": "temperature", "shards": None}
        # A price is one of confidences, which other methods do not compare with their threshold.
        plain |= {"price": None}
        given = next((name for name, default in plain.items() if getattr(self, name) != default), None)
        if given is not None:
            raise ConfigError(f"{given} is for methods base, rf and stacked, not for {self.method}; leave it out")

    @property
    def searches(self) -> bool:
        """Return whether the chain is chosen among all sub-chains of the models."""
        return self.search or self.method == "auto"

    @property
    def threshold_rule(self) -> ThresholdRule:
        """Return what decides the threshold. Raises ConfigError where options contradict each other."""
        limit = None if self.certify is None else RiskLimit.parse(self.certify)
        compare: Compared = self.rule if self.method == "rf" else "confidence"
        return ThresholdRule(self.threshold, self.budget, self.objective, limit, self.price, compare)


class ComparedSet(BaseModel):
    """A logit table of a comparison.

    Attributes:
        name: What the results call it.
        logits: The table.
        chains: Chains of its models, each cheapest first; without any all models by cost.
        embedding: An encoder of the table, for routers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[^\x00-\x1f]+$")
    logits: Location
    chains: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()
    embedding: str | None = None

    @model_validator(mode="after")
    def _unique(self) -> Self:
        _require_chains(f"{self.name}: ", self.chains)
        return self


def _require_unique(what: str, values: Sequence[Any]) -> None:
    duplicate = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if duplicate is not None:
        raise ConfigError(f"{what} {duplicate!r} is a duplicate")


def _require_chains(where: str, chains: Sequence[Sequence[str]]) -> None:
    for chain in chains:
        _require_unique(f"{where}in a chain, model", chain)
    _require_unique(f"{where}chain", chains)


class CompareOptions(ChainOptions, ClusterOptions):
    """What is compared: methods over budgets, seeds, chains and sets."""

    GROUP = "comparing"
    methods: Names = option(
        "names of methods; 'single' is each model alone, 'recalibrated' each model and each other method that is named "
        "once more on recalibrated logits",
        ("all",),
        min_length=1,
    )
    budget: float | None = option(
        "mean cost per example on validation that every method may spend (default: base's at its own threshold)",
        allow_inf_nan=False,
    )
    budgets: Amounts = option("several budgets", ())
    relative_budgets: Amounts = option("budgets as shares of the mean cost of the chain's most expensive model", ())
    points: int | None = option(
        "this many budgets, evenly spaced from the mean cost of the cheapest model to that of the most expensive",
        ge=2,
        le=1_000,
    )
    seeds: Seeds = option("several seeds, in place of seed", ())
    chains: Chains = option("several chains, in place of models", ())
    sets: Annotated[tuple[ComparedSet, ...], Flag(config_only=True)] = option(
        "several logit tables, each with a name and chains, in place of one", ()
    )
    reference: str | None = option("method that others are compared with (default: rf, else base)")
    objective: Objective = option("what is maximised within a budget", "accuracy")
    split: str = option("the split to measure on", "test")
    test: Cut = option("share of the calibration split to measure on (default: the test split)")
    embedding: str | None = option(
        "what routers look at: an encoder of the table, or a model, whose call they pay (default: the first model's "
        "outputs)"
    )
    redrawn: Names | None = option(
        "splits that are pooled and cut into the same sizes again with each seed (default: with several seeds "
        "calibration and validation, else none)"
    )
    training_split: str | None = option("what routers and scorers are trained on (default: the calibration split)")
    texts: Location | None = option("Parquet file of the queries' texts, for methods that train on them")
    text_column: str = option("the column of texts", "question")
    checkpoints: Annotated[dict[str, str], Flag("METHOD=MODEL,…", several)] = option(
        "what these methods train: a hub id or a folder each, as routellm-bert=bert-base-uncased", {}
    )
    address: str | None = option(
        "address of a Ray cluster, or local: a task for each method, chain and seed (default: RAY_ADDRESS, else this "
        "process)"
    )
    deadline_s: float = option("on a cluster: seconds that one method may take on one chain", 3600.0, gt=0)

    @property
    def cuts(self) -> dict[str, Cut]:
        """Return by name the splits that are read: fitted, chosen and measured on; then trained on, if any."""
        training = {} if self.training_split is None else {self.training_split: None}
        return {**super().cuts, self.split: self.test, **training}

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """Return the seeds."""
        return self.seeds or (self.seed,)

    @property
    def all_budgets(self) -> tuple[float, ...]:
        """Return the budgets that are costs, in the table's unit."""
        return self.budgets if self.budget is None else (self.budget,)

    @property
    def pooled(self) -> tuple[str, ...]:
        """Return the splits that each seed cuts again."""
        return self.redrawn if self.redrawn is not None else self.splits if len(self.all_seeds) > 1 else ()

    @model_validator(mode="after")
    def _measured_apart(self) -> Self:
        if self.split in self.splits:
            raise ConfigError(f"split {self.split!r} is what methods are fitted or chosen on; measure them on another")
        if self.training_split in (*self.splits, self.split):
            raise ConfigError(
                f"split {self.training_split!r} has another use already; give a training split of its own"
            )
        redrawn = self.redrawn or ()
        _require_unique("in redrawn, split", redrawn)
        for name in redrawn:
            if name not in self.cuts:
                raise ConfigError(f"redrawn: {unknown_name('split', name, self.cuts)}")
        if len(redrawn) == 1:
            raise ConfigError(f"redrawn: {redrawn[0]!r} cannot be pooled with nothing; name two splits or none")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sets and (self.chains or self.models is not None):
            raise ConfigError("sets have chains of their own; leave models and chains out")
        if self.chains and self.models is not None:
            raise ConfigError("models are one chain, chains several; give one of the two")
        if sum((self.budget is not None, bool(self.budgets or self.relative_budgets), self.points is not None)) > 1:
            raise ConfigError("budget is one, budgets several, points are evenly spaced ones; give one of the three")
        for what in ("method", "seed", "budget", "relative_budget"):
            _require_unique(what.replace("_", " "), getattr(self, f"{what}s"))
        _require_chains("", self.chains)
        _require_unique("set", [compared.name for compared in self.sets])
        return self


class EvaluateOptions(ShardOptions):
    """What a policy is replayed on."""

    GROUP = "logits"
    split: str = option("the split to replay", "test")
    logit_kind: Kinds | None = option("what the logits are (default: as declared, else what the policy was fitted on)")


class CheckOptions(Options):
    """What a policy is checked on."""

    GROUP = "logits"
    split: str = option("the split to check", "test")
    seed: Seed = option("seed of the order in which examples come", 0)
    logit_kind: Kinds | None = option("what the logits are (default: as declared, else what the policy was fitted on)")


COLUMNS = option(
    "the data's own names for example_id, label, image, question, choices (a+b+c for several), context and other "
    "columns that models read, as image=jpeg",
    {},
)


class CollectOptions(ClusterOptions):
    """What is collected."""

    GROUP = "collecting"
    split: str | None = option("only this one, or all (default: each of the dataset's)")
    models: Names | None = option("only these of the pool (default: all)", min_length=1)
    columns: Pairs = COLUMNS
    skip_unknown_labels: bool = option("leave out rows whose label is none of the pool's, with a warning", False)
    embedding: Annotated[str | None, BeforeValidator(_as_encoder)] = option(
        "collect embeddings instead of logits: a stage, hub id or folder of an encoder"
    )
    seed: Seed = option("seed of the splits", 0)


class RunOptions(ClusterOptions):
    """How a run starts."""

    GROUP = "running"
    resume: bool = option("continue the run in the output folder that ended early, if any", False)
    retry_failed: bool = option("with resume: try the rows in failed/ again", False)
    columns: Pairs = COLUMNS

    @model_validator(mode="after")
    def _resumed(self) -> Self:
        if self.retry_failed and not self.resume:
            raise ConfigError("only a run that is resumed has failed rows to try again; give resume (--resume) as well")
        return self


class ServeOptions(ClusterOptions):
    """Where and how a cascade is served."""

    GROUP = "serving"
    host: str = option("address to listen on; 0.0.0.0 for all networks", "127.0.0.1")
    port: int = option("port to listen on; 0 takes a free one", 8000)
    grpc_port: int | None = option("port to answer gRPC on as well; 0 takes a free one (default: none)")
    name: str | None = option("name of the model in URLs (default: the pool's)")
    local: bool = option("serve from this process, without Ray", False)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.local and self.address is not None:
            raise ConfigError("a local service runs without Ray: give either local or the address of a Ray cluster")
        return self


class PlanOptions(Options):
    """What a plan is made for."""

    GROUP = "planning"
    rate: float = option("requests per second, one row each", ...)
    slo_p99_s: Annotated[float | None, Flag("S", spellings=("--slo-p99",))] = option(
        "seconds within which 99 of 100 requests must be answered"
    )
    ledger: Annotated[Location | None, Flag(metavar="RUN")] = option(
        "folder of an earlier `cauc run`, which says how long batches take"
    )


class SetPolicyOptions(Options):
    """How a running service's policy changes."""

    GROUP = "change"
    budget: float | None = option("mean cost per example, from the policy's own curve")
    threshold: float | None = option("a threshold to use as it is")
    share: float | None = option(
        "share of the requests: makes the policy the candidate; by itself another share for the candidate, which 0 ends"
    )
    promote: bool = option("let the candidate have all requests", False)
    rollback: bool = option("end the candidate", False)
    url: str = option("address of the service", "http://127.0.0.1:8000")
    name: str | None = option("name of the model (default: the only one)")
