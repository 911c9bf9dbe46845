"""GraphRouter (Feng et al., ICLR 2025): message passing between queries and models, whose edges it predicts."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from cauc_ray.numbers.types import Floats
from cauc_ray.policies.baselines.controls import fit_single
from cauc_ray.policies.baselines.features import QueryVectors, Scaling
from cauc_ray.policies.baselines.routing import router
from cauc_ray.policies.baselines.training import one_thread
from cauc_ray.policies.method import Fitted, Fitting, Steered
from cauc_ray.policies.trace import Examples

with warnings.catch_warnings():
    # Up to 2.8 torch_geometric compiles parts of itself by torch.jit as it is imported, which torch has deprecated.
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    from torch_geometric.nn import GeneralConv

WIDTH = 8  # of an aligned query, and of the task; a node is the two side by side
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 1e-4
EPOCHS = 2000
PATIENCE = 500  # epochs; losses stand still for hundreds before the models' vectors part
WARM_UP = 50  # epochs until the running statistics of BatchNorm, a tenth of them new in each, are those of the data


@dataclass(frozen=True, slots=True)
class GraphRouter:
    """A fitted GraphRouter: the score of an edge from a new query to each model.

    As in the released code, the score takes a query as it was aligned, before any message, and no message goes to a
    query. So what the models gathered from the calibration split is fixed once trained, and a score is the sigmoid of
    a linear function of the query: it needs no graph, and depends on no other query that is asked with it.

    weights: float32 (M, d), of scaled features.   offsets: float32 (M,).
    """

    vectors: QueryVectors
    scaling: Scaling
    weights: Floats
    offsets: Floats

    def __call__(self, examples: Examples) -> Floats:
        """Return how likely each model's answer is among the best, float64 (N, M)."""
        vectors = self.scaling(self.vectors(examples))
        # A sum along each row: a matrix product would give rows other last bits in other company.
        logits = np.vecdot(vectors[:, None], self.weights) + np.float64(self.offsets)
        scores: Floats = np.exp(-np.logaddexp(0.0, -logits))
        return scores


@dataclass(frozen=True, slots=True)
class Graph:
    """The calibration split's queries, the models, and an edge from every query to every model.

    queries: float32 (N, d).   models: float32 (M, M + 2): one-hot, accuracy, cost relative to the dearest.
    edges: int64 (2, E), query and model.   attributes: float32 (E, 3): utility, min-max-normalised cost, effect.
    targets: float32 (E,), 1 where no other model has a higher utility on the query, else 0.
    """

    queries: torch.Tensor
    models: torch.Tensor
    edges: torch.Tensor
    attributes: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, examples: Examples, vectors: Floats) -> Graph:
        """Build the graph of labelled examples.   vectors: float32 (N, d)."""
        effect = examples.correct().astype(np.float32)
        n, m = effect.shape
        costs = examples.chain.costs
        models = np.column_stack([np.eye(m), effect.mean(axis=0), _ratio(costs.means, costs.means.max())])
        lowest, highest = costs.per_call.min(), costs.per_call.max()
        normalised = np.broadcast_to(_ratio(costs.per_call - lowest, highest - lowest), (n, m))
        # Utility is a * effect - b * cost; quality first has (a, b) = (1, 0).
        attributes = np.stack([effect, normalised, effect], axis=2).reshape(n * m, 3)
        edges = np.indices((n, m)).reshape(2, n * m)
        return cls(
            queries=_floats(vectors),
            models=_floats(models),
            edges=torch.from_numpy(edges),
            attributes=_floats(attributes),
            targets=_floats(_best(effect)),
        )


def _ratio(values: Floats, whole: float) -> Floats:
    ratio: Floats = values / (whole if whole > 0 else 1.0)
    return ratio


def _best(utility: Floats) -> Floats:
    """Return where a utility is its row's highest, (N M,): all of equals, else low places would win the many ties."""
    best: Floats = (utility == utility.max(axis=1, keepdims=True)).ravel()
    return best


def _floats(values: Floats) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))


@dataclass(frozen=True, slots=True)
class Network:
    """The layers: alignments of the nodes, one for edges, two rounds of convolution with batch normalisation."""

    layers: nn.ModuleDict

    @classmethod
    def drawn(cls, graph: Graph, generator: torch.Generator) -> Network:
        """Draw the initial parameters, uniform within 1 / sqrt(inputs) as is the default of both libraries."""
        layers = nn.ModuleDict(
            {
                "query": nn.Linear(graph.queries.shape[1], WIDTH),
                "task": nn.Linear(1, WIDTH),
                "model": nn.Linear(graph.models.shape[1], 2 * WIDTH),
                "edge": nn.Linear(3, 3),
                "rounds": nn.ModuleList(GeneralConv(2 * WIDTH, 2 * WIDTH, in_edge_channels=3) for _ in range(2)),
                "norms": nn.ModuleList(nn.BatchNorm1d(2 * WIDTH) for _ in range(2)),
            }
        )
        with torch.no_grad():
            for layer in layers.modules():
                if not isinstance(layer, nn.BatchNorm1d) and getattr(layer, "weight", None) is not None:
                    bound = 1.0 / math.sqrt(layer.weight.shape[1])
                    layer.weight.uniform_(-bound, bound, generator=generator)
                    layer.bias.uniform_(-bound, bound, generator=generator)
        return cls(layers)

    def queries(self, graph: Graph) -> torch.Tensor:
        """Return the aligned queries, float32 (N, 2 WIDTH): the one task there is, then the query itself."""
        own = self.layers["query"](graph.queries)
        return torch.cat([self._task().expand(len(own), -1), own], dim=1)

    def models(self, graph: Graph, queries: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Return what the models gather from aligned queries along visible edges (their places), (M, 2 WIDTH)."""
        nodes = torch.cat([queries, self.layers["model"](graph.models)])
        source, target = graph.edges[:, visible]
        edges = torch.stack([source, len(queries) + target])
        attributes = self.layers["edge"](graph.attributes[visible]).relu()
        for convolution, norm in zip(self.layers["rounds"], self.layers["norms"], strict=True):
            nodes = norm(convolution(nodes, edges, attributes)).relu()
        return nodes[len(queries) :]

    def linear(self, graph: Graph) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights (M, d) and offsets (M,) of the scores' logits when every edge of the graph is visible."""
        self.layers.eval()
        with torch.no_grad():
            models = self.models(graph, self.queries(graph), torch.arange(graph.edges.shape[1])) / (2 * WIDTH)
            of_task, of_query = models[:, :WIDTH], models[:, WIDTH:]
            query = self.layers["query"]
            return of_query @ query.weight, of_task @ self._task()[0] + of_query @ query.bias

    def _task(self) -> torch.Tensor:
        return self.layers["task"](torch.ones(1, 1))


def fit_graphrouter(fitting: Fitting) -> Fitted:
    """Train the network to tell, of random halves of the calibration split's edges, which lead to the best model.

    As published, quality first: AdamW by binary cross-entropy, a score being the sigmoid of the mean product of the
    aligned query and the convolved model. Saved outputs hold no descriptions of models or tasks: a model's features
    are its place, accuracy and cost instead of an embedded text, and there is one task. Where models tie, all of the
    best are targets. A step hides one random half of the edges instead of 32 halves, which orders test queries as
    well and takes a tenth of the time. Of at most 2,000 epochs that of the lowest validation loss counts; training
    stops when none was lower for 500.
    """
    if len(fitting.calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    vectors = QueryVectors.of(fitting.calibration)
    scaling = Scaling.of(vectors(fitting.calibration))
    graph = Graph.of(fitting.calibration, scaling(vectors(fitting.calibration)))
    validation = Graph.of(fitting.validation, scaling(vectors(fitting.validation)))
    with one_thread():
        weights, offsets = _trained(graph, validation, torch.Generator().manual_seed(fitting.seed))
    values = GraphRouter(vectors, scaling, weights.numpy(), offsets.numpy())
    cascade = router(values, fitting.validation, paid=vectors.paid)
    note = vectors.note("no descriptions of models", "one mask a step, early stopping")
    return Steered(cascade, fitting.validation, given=0.0, note=note)


def _trained(graph: Graph, validation: Graph, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and offsets of the epoch that predicts the validation split's edges best."""
    network = Network.drawn(graph, generator)
    optimizer = torch.optim.AdamW(network.layers.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    best, best_epoch, lowest = network.linear(graph), WARM_UP, math.inf
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        masked_loss(network, graph, generator).backward()
        optimizer.step()
        weights, offsets = network.linear(graph)
        logits = validation.queries @ weights.T + offsets
        loss = nn.functional.binary_cross_entropy_with_logits(logits.flatten(), validation.targets).item()
        if epoch >= WARM_UP and loss < lowest:
            best, best_epoch, lowest = (weights, offsets), epoch, loss
        if epoch - best_epoch >= PATIENCE:
            break
    return best


def masked_loss(network: Network, graph: Graph, generator: torch.Generator) -> torch.Tensor:
    """Return the loss of predicting a random half of the edges from the others."""
    network.layers.train()
    n_edges = graph.edges.shape[1]
    visible, hidden = torch.randperm(n_edges, generator=generator).tensor_split([n_edges // 2])
    queries = network.queries(graph)
    models = network.models(graph, queries, visible)
    source, target = graph.edges[:, hidden]
    logits = (queries[source] * models[target]).mean(dim=1)
    return nn.functional.binary_cross_entropy_with_logits(logits, graph.targets[hidden])
