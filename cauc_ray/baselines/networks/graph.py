"""GraphRouter (Feng et al., ICLR 2025): message passing between queries and models, whose edges it predicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from cauc_ray.baselines.networks.training import Schedule, linear, one_thread, train
from cauc_ray.baselines.routing import Read
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.features import Scaler
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.trace import Examples

WIDTH = 8  # of an aligned query, and of the task; a node is the two side by side
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 1e-4
EPOCHS = 2000
PATIENCE = 500  # epochs; losses are flat for hundreds before the models' vectors separate
WARM_UP = 50  # epochs until the running statistics of BatchNorm, a tenth of them new in each, are those of the data


@dataclass(frozen=True, slots=True)
class Graph:
    """The calibration split's queries, the models, and an edge from every query to every model.

    Attributes:
        queries: Vectors of the queries, float32 (N, d).
        models: One-hot, accuracy, cost relative to the most expensive, float32 (M, M + 2).
        edges: Query and model, int64 (2, E).
        attributes: Utility, min-max-normalised cost, effect, float32 (E, 3).
        targets: 1 if no other model has a higher utility on the query, otherwise 0, float32 (E,).
    """

    queries: torch.Tensor
    models: torch.Tensor
    edges: torch.Tensor
    attributes: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, examples: Examples, vectors: Floats) -> Graph:
        """Build the graph of labelled examples and their vectors, float32 (N, d)."""
        effect = examples.correct().astype(np.float32)
        n, m = effect.shape
        costs = examples.chain.costs
        models = np.column_stack([np.eye(m), effect.mean(axis=0), _ratio(costs.means, costs.means.max())])
        lowest, highest = costs.per_call.min(), costs.per_call.max()
        normalised = np.broadcast_to(_ratio(costs.per_call - lowest, highest - lowest), (n, m))
        # Utility is a * effect - b * cost; quality first has (a, b) = (1, 0).
        attributes = np.stack([effect, normalised, effect], axis=2).reshape(n * m, 3)
        # All of equals are targets, else models of low index would win the many ties.
        targets = (effect == effect.max(axis=1, keepdims=True)).ravel()
        edges = torch.from_numpy(np.indices((n, m)).reshape(2, n * m))
        return cls(_floats(vectors), _floats(models), edges, _floats(attributes), _floats(targets))


def _ratio(values: Floats, total: float) -> Floats:
    ratio: Floats = values / (total if total > 0 else 1.0)
    return ratio


def _floats(values: Floats) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))


class Round(nn.Module):
    """A round of messages along edges: what a node gathers is added to it, normalised over all nodes, and rectified."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.message = linear(2 * WIDTH, 2 * WIDTH, generator)
        self.edge = linear(3, 2 * WIDTH, generator)
        self.norm = nn.BatchNorm1d(2 * WIDTH)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, attributes: torch.Tensor) -> torch.Tensor:
        """Return the nodes after the round.

        Args:
            nodes: float32 (n, 2 WIDTH).
            edges: From and to, int64 (2, E).
            attributes: Of the edges, float32 (E, 3).
        """
        source, target = edges
        messages = self.message(nodes.index_select(0, source)) + self.edge(attributes)
        gathered = torch.zeros_like(nodes).index_add(0, target, messages)
        after: torch.Tensor = self.norm(gathered + nodes).relu()
        return after


class Network(nn.Module):
    """The layers: alignments of the nodes, one for edges, two rounds of messages."""

    def __init__(self, graph: Graph, generator: torch.Generator) -> None:
        super().__init__()
        self.query = linear(graph.queries.shape[1], WIDTH, generator)
        self.task = linear(1, WIDTH, generator)
        self.model = linear(graph.models.shape[1], 2 * WIDTH, generator)
        self.edge = linear(3, 3, generator)
        self.rounds = nn.ModuleList(Round(generator) for _ in range(2))

    def queries(self, graph: Graph) -> torch.Tensor:
        """Return the aligned queries, float32 (N, 2 WIDTH): the only task, then the query itself."""
        aligned = self.query(graph.queries)
        return torch.cat([self._task().expand(len(aligned), -1), aligned], dim=1)

    def models(self, graph: Graph, queries: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Return what the models gather from aligned queries along visible edges (indices), (M, 2 WIDTH)."""
        nodes = torch.cat([queries, self.model(graph.models)])
        source, target = graph.edges[:, visible]
        attributes = self.edge(graph.attributes[visible]).relu()
        for one_round in self.rounds:
            nodes = one_round(nodes, torch.stack([source, len(queries) + target]), attributes)
        return nodes[len(queries) :]

    def linear(self, graph: Graph) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights (M, d) and offsets (M,) of the scores' logits when every edge of the graph is visible."""
        models = self.models(graph, self.queries(graph), torch.arange(graph.edges.shape[1])) / (2 * WIDTH)
        of_task, of_query = models[:, :WIDTH], models[:, WIDTH:]
        return of_query @ self.query.weight, of_task @ self._task()[0] + of_query @ self.query.bias

    def masked_loss(self, graph: Graph, edges: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting the second half of some edges (indices) from the first."""
        visible, hidden = edges.tensor_split([len(edges) // 2])
        queries = self.queries(graph)
        models = self.models(graph, queries, visible)
        source, target = graph.edges[:, hidden]
        logits = (queries[source] * models[target]).mean(dim=1)
        return binary_cross_entropy_with_logits(logits, graph.targets[hidden])

    def _task(self) -> torch.Tensor:
        task: torch.Tensor = self.task(torch.ones(1, 1))
        return task


@one_thread()
def trained(fitting: Fitting, vectors: Read) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, and return what the logits of scores are linear in.

    As in the released code, a score takes a query as it was aligned, before any message, and no message goes to a
    query. So what the models gathered from the calibration split is fixed once trained, and a score is the sigmoid of
    a linear function of the query: it needs no graph, and depends on no other query that is asked with it.
    """
    generator = torch.Generator().manual_seed(fitting.seed)
    scaler = Scaler.of(vectors(fitting.calibration))
    graph, held_out = (Graph.of(e, scaler(vectors(e))) for e in (fitting.calibration, fitting.validation))
    network = Network(graph, generator)

    def validation_loss() -> torch.Tensor:
        weights, offsets = network.linear(graph)
        return binary_cross_entropy_with_logits((held_out.queries @ weights.T + offsets).flatten(), held_out.targets)

    optimiser = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    n_edges = graph.edges.shape[1]
    schedule = Schedule(n_edges, EPOCHS, check_every=1, patience=PATIENCE, warm_up=WARM_UP)  # a step is an epoch
    train(
        network,
        optimiser,
        lambda edges: network.masked_loss(graph, edges),
        validation_loss,
        n_edges,
        schedule,
        generator,
    )
    with torch.no_grad():
        weights, offsets = network.linear(graph)
    scaled = np.float64(weights.numpy()) / scaler.scales
    return {"weights": scaled, "offsets": np.float64(offsets.numpy()) - scaled @ scaler.means}, {}
