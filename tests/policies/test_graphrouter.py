from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import examples, of_rows, problem
from synthetic import seeds

from cauc_ray.numbers.costs import Costs
from cauc_ray.policies.baselines import graphrouter
from cauc_ray.policies.baselines.features import QueryVectors, scaler_of
from cauc_ray.policies.baselines.graphrouter import Graph, GraphRouter, Network, fit_graphrouter


@pytest.fixture(autouse=True)
def _few_epochs(monkeypatch):
    """Train hardly at all: what it learns is seen in test_baselines."""
    monkeypatch.setattr(graphrouter, "EPOCHS", 60)


def message_passing(network, graph, new):
    """Return the scores of edges from new queries, one node and one message at a time, in float64."""
    numbers = {name: value.numpy().astype(np.float64) for name, value in network.state_dict().items()}

    def linear(name, vector):
        return numbers[f"{name}.weight"] @ vector + numbers[f"{name}.bias"]

    def aligned(query):
        return np.concatenate([linear("task", np.ones(1)), linear("query", np.float64(query))])

    queries = [aligned(query) for query in (*graph.queries.numpy(), *new)]
    nodes = [*queries, *(linear("model", np.float64(model)) for model in graph.models.numpy())]
    for i in (0, 1):
        gathered = [node.copy() for node in nodes]
        for (query, model), attributes in zip(graph.edges.T.numpy(), np.float64(graph.attributes), strict=True):
            message = linear(f"rounds.{i}.message", nodes[query])
            message = message + linear(f"rounds.{i}.edge", np.maximum(linear("edge", attributes), 0))
            gathered[len(queries) + model] += message
        norm = {name: numbers[f"rounds.{i}.norm.{name}"] for name in ("running_mean", "running_var", "weight", "bias")}
        scale = norm["weight"] / np.sqrt(norm["running_var"] + 1e-5)
        nodes = [np.maximum((node - norm["running_mean"]) * scale + norm["bias"], 0) for node in gathered]
    models = nodes[len(queries) :]
    logits = np.array([[np.mean(query * model) for model in models] for query in queries[len(graph.queries) :]])
    return 1 / (1 + np.exp(-logits))


@given(seeds, st.sampled_from([1, 2, 4]))
@settings(max_examples=10)
def test_scores_are_those_of_message_passing_with_new_queries_in_the_graph(seed, m):
    known, new = examples(seed, 0, n=25, m=m), examples(seed, 1, n=7, m=m)
    vectors = QueryVectors.of(known)
    scaler = scaler_of(vectors(known))
    graph = Graph.of(known, scaler.transform(vectors(known)))
    generator = torch.Generator().manual_seed(seed)
    network = Network(graph, generator)
    for _ in range(3):  # so that the norms have statistics of their own
        network.models(graph, network.queries(graph), torch.randperm(25 * m, generator=generator)[: 12 * m])
    network.eval()
    weights, offsets = (numbers.detach().numpy() for numbers in network.linear(graph))
    values = GraphRouter(vectors, scaler, weights, offsets)(new)
    assert values.dtype == np.float64
    assert values == pytest.approx(message_passing(network, graph, scaler.transform(vectors(new))), abs=1e-4)


def test_the_second_half_of_the_edges_is_predicted_from_what_the_first_says():
    known = examples(9, 0, n=31)
    graph = Graph.of(known, known.embeddings)
    network = Network(graph, torch.Generator().manual_seed(0))
    order = torch.randperm(62, generator=torch.Generator().manual_seed(1))
    visible = set(order[:31].tolist())
    for edge, name in product(range(62), ("targets", "attributes")):
        altered = getattr(graph, name).clone()
        altered[edge] = 1 - altered[edge]
        losses = [network.masked_loss(own, order).item() for own in (graph, replace(graph, **{name: altered}))]
        assert (losses[0] != losses[1]) == ((edge in visible) == (name == "attributes"))


@given(seeds, st.sampled_from([1, 2, 4]), st.booleans(), st.booleans())
@settings(max_examples=15)
def test_the_graph_has_an_edge_from_each_query_to_each_model(seed, m, ragged, per_call):
    known = examples(seed, 0, n=12, m=m, ragged=ragged, per_call=per_call)
    graph = Graph.of(known, known.embeddings)
    costs = np.broadcast_to(known.chain.costs.per_call, (12, m))
    right = np.array([[z[i].argmax() == known.chain.labels[i] for z in known.chain.logits] for i in range(12)])
    right = right.astype(float)
    edge = 0
    for query in range(12):
        for model in range(m):
            cost = (costs[query, model] - costs.min()) / (np.ptp(costs) or 1.0)
            assert graph.edges[:, edge].tolist() == [query, model]
            assert graph.attributes[edge].tolist() == pytest.approx([right[query, model], cost, right[query, model]])
            assert graph.targets[edge] == (right[query, model] or not right[query].any())
            edge += 1
    assert edge == graph.edges.shape[1] == len(graph.targets)
    for model, (*one_hot, accuracy, cost) in enumerate(graph.models.tolist()):
        assert one_hot == np.eye(m)[model].tolist()
        assert accuracy == pytest.approx(right[:, model].mean())
        assert cost == pytest.approx(costs[:, model].mean() / costs.mean(axis=0).max())


def test_models_that_cost_nothing_divide_nothing_by_zero():
    known = examples(1, 0, n=20)
    free = replace(known, chain=replace(known.chain, costs=Costs("USD", np.zeros(2))))
    graph = Graph.of(free, free.embeddings)
    assert (graph.attributes[:, 1] == 0).all()
    assert (graph.models[:, -1] == 0).all()


@pytest.mark.parametrize("embedded", [False, True])
def test_a_querys_values_do_not_depend_to_the_bit_on_those_asked_with_it(embedded):
    fitting, test = problem(4, n=60, n_test=60, m=3, d=37, embedded=embedded)
    router = fit_graphrouter(fitting).cascade.values
    together = router(test)

    @given(st.lists(st.integers(0, 59), min_size=1, max_size=60))
    def asked(rows):
        assert (router(of_rows(test, rows)) == together[rows]).all()

    asked()


def test_the_epoch_of_the_lowest_validation_loss_counts_once_the_norms_know_the_data(monkeypatch):
    monkeypatch.setattr(graphrouter, "LEARNING_RATE", 3e-3)
    fitting, _ = problem(7, n=120, n_test=1)
    tried = []

    def linear(network, graph, fitted=Network.linear):
        tried.append(fitted(network, graph))
        return tried[-1]

    monkeypatch.setattr(Network, "linear", linear)
    router = fit_graphrouter(fitting).cascade.values
    right = fitting.validation.correct()
    best = right == right.max(axis=1, keepdims=True)
    vectors = np.float64(router.scaler.transform(router.vectors(fitting.validation)))
    losses = []
    for weights, offsets in tried[:-1]:  # the last is that of the weights that were kept
        logits = vectors @ np.float64(weights).T + np.float64(offsets)
        losses.append(np.logaddexp(0, np.where(best, -logits, logits)).mean())
    chosen = next(i for i, (weights, _) in enumerate(tried) if np.array_equal(weights, router.weights))
    assert losses[chosen] == pytest.approx(min(losses[graphrouter.WARM_UP :]), rel=1e-6)
