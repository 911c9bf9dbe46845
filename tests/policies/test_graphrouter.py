from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.costs import Costs
from cauc_ray.policies.baselines import graphrouter
from cauc_ray.policies.baselines.features import QueryVectors, Scaling
from cauc_ray.policies.baselines.graphrouter import Graph, GraphRouter, Network, fit_graphrouter, masked_loss
from cauc_ray.policies.method import Fitting
from cauc_ray.policies.trace import Examples

seeds = st.integers(0, 2**32 - 1)
STRENGTHS = (1.0, 1.6, 2.2, 2.8)


@pytest.fixture
def few_epochs(monkeypatch):
    """Train hardly at all, where a test is about something else than what is learnt."""
    monkeypatch.setattr(graphrouter, "EPOCHS", 60)


def examples(seed, n, m, shift=0, *, d=6, ragged=False, per_call=False):
    data = chain(seed, n, 5, STRENGTHS[:m], ragged=ragged, per_call=per_call, shift=shift)
    vectors = np.random.default_rng([seed, shift]).standard_normal((n, d)).astype(np.float32)
    return Examples(data, vectors)


def planted(n, shift, *, learnable, k=4, d=8):
    """Return examples of two models, each right more often on queries that point its own way, if learnable."""
    rng = np.random.default_rng([5, shift])
    vectors = rng.standard_normal((n, d)).astype(np.float32)
    own_way = vectors[:, :2] * 2.0 if learnable else 0.0
    right = rng.random((n, 2)) < 1 / (1 + np.exp(-np.array([0.3, 0.9]) - own_way))
    labels = rng.integers(0, k, n).astype(np.int32)
    answers = np.where(right, labels[:, None], (labels[:, None] + rng.integers(1, k, (n, 2))) % k)
    return Examples(
        ChainLogits(
            models=("cheap", "dear"),
            logits=tuple(np.eye(k, dtype=np.float32)[answers[:, model]] for model in (0, 1)),
            example_ids=tuple(f"{shift}-{row}" for row in range(n)),
            labels=labels,
            costs=Costs("GFLOPs", np.array([1.0, 10.0])),
            per_call_costs=False,
            source="planted",
            logit_kind="raw",
        ),
        vectors,
    )


def gain_over_a_mixture(learnable):
    """Return how much more accurate it is on a test split than models mixed by lot at equal cost, over all costs."""
    calibration, validation, test = (planted(n, at, learnable=learnable) for at, n in enumerate((400, 400, 4000)))
    fitted = fit_graphrouter(Fitting(calibration, validation))
    curve = fitted.curve(test, fitted.points.settings)
    mixture = np.interp(curve.cost, [1.0, 10.0], test.correct().mean(axis=0))
    return np.mean(curve.accuracy - mixture), fitted, test


def test_it_beats_a_mixture_at_equal_cost_where_embeddings_tell_who_is_right():
    gain, fitted, test = gain_over_a_mixture(learnable=True)
    assert gain > 0.05
    assert fitted.default == 0.0
    answers = fitted.answers(test, fitted.default)
    assert np.mean(answers.predictions == test.chain.labels) > test.correct().mean(axis=0).max() + 0.05
    assert (answers.calls.sum(axis=1) == 1).all()


def test_it_gains_nothing_where_embeddings_tell_nothing():
    gain, _, _ = gain_over_a_mixture(learnable=False)
    assert abs(gain) < 0.02


def message_passing(network, graph, new):
    """Return the scores of edges from new queries, one node and one message at a time, in float64."""
    numbers = {name: value.numpy().astype(np.float64) for name, value in network.layers.state_dict().items()}

    def linear(name, vector):
        return numbers[f"{name}.weight"] @ vector + numbers[f"{name}.bias"]

    def aligned(query):
        return np.concatenate([linear("task", np.ones(1)), linear("query", np.float64(query))])

    queries = [aligned(query) for query in (*graph.queries.numpy(), *new)]
    nodes = [*queries, *(linear("model", np.float64(model)) for model in graph.models.numpy())]
    for place in (0, 1):
        gathered = [node.copy() for node in nodes]
        for (query, model), attributes in zip(graph.edges.T.numpy(), np.float64(graph.attributes), strict=True):
            message = linear(f"rounds.{place}.lin_msg", nodes[query])
            message = message + linear(f"rounds.{place}.lin_edge", np.maximum(linear("edge", attributes), 0))
            gathered[len(queries) + model] += message
        norm = {name: numbers[f"norms.{place}.{name}"] for name in ("running_mean", "running_var", "weight", "bias")}
        scale = norm["weight"] / np.sqrt(norm["running_var"] + 1e-5)
        nodes = [np.maximum((node - norm["running_mean"]) * scale + norm["bias"], 0) for node in gathered]
    models = nodes[len(queries) :]
    logits = np.array([[np.mean(query * model) for model in models] for query in queries[len(graph.queries) :]])
    return 1 / (1 + np.exp(-logits))


@given(seeds, st.sampled_from([1, 2, 4]))
@settings(max_examples=10)
def test_scores_are_those_of_message_passing_with_new_queries_in_the_graph(seed, m):
    known, new = examples(seed, 25, m), examples(seed, 7, m, shift=1)
    vectors = QueryVectors.of(known)
    scaling = Scaling.of(vectors(known))
    graph = Graph.of(known, scaling(vectors(known)))
    generator = torch.Generator().manual_seed(seed)
    network = Network.drawn(graph, generator)
    for _ in range(3):  # so that the norms have statistics of their own
        network.models(graph, network.queries(graph), torch.randperm(25 * m, generator=generator)[: 12 * m])
    weights, offsets = network.linear(graph)
    values = GraphRouter(vectors, scaling, weights.numpy(), offsets.numpy())(new)
    assert values.dtype == np.float64
    assert values == pytest.approx(message_passing(network, graph, scaling(vectors(new))), abs=1e-4)


def test_edges_that_are_hidden_say_nothing():
    known = examples(2, 30, 2)
    graph = Graph.of(known, known.embeddings)
    network = Network.drawn(graph, torch.Generator().manual_seed(0))
    visible = torch.arange(0, 60, 2)
    altered = graph.attributes.clone()
    altered[1::2] += 1.0
    shown = altered.roll(1, dims=0)
    queries = network.queries(graph)
    models = network.models(graph, queries, visible)
    assert torch.equal(network.models(replace(graph, attributes=altered), queries, visible), models)
    assert not torch.equal(network.models(replace(graph, attributes=shown), queries, visible), models)


def test_half_of_the_edges_is_predicted_from_the_other_half(monkeypatch):
    known = examples(9, 31, 2)
    graph = Graph.of(known, known.embeddings)
    network = Network.drawn(graph, torch.Generator().manual_seed(0))
    seen = []

    def models(network, graph, queries, visible, plain=Network.models):
        seen.append(set(visible.tolist()))
        return plain(network, graph, queries, visible)

    monkeypatch.setattr(Network, "models", models)

    def loss(seed, targets):
        return masked_loss(network, replace(graph, targets=targets), torch.Generator().manual_seed(seed)).item()

    plain = loss(1, graph.targets)
    for place in range(62):
        altered = graph.targets.clone()
        altered[place] = 1 - altered[place]
        assert (loss(1, altered) == plain) == (place in seen[0])
    assert len(seen[0]) == 31
    loss(2, graph.targets)
    assert seen[-1] != seen[0]


@given(seeds, st.sampled_from([1, 2, 4]), st.booleans(), st.booleans())
@settings(max_examples=15)
def test_the_graph_has_an_edge_from_each_query_to_each_model(seed, m, ragged, per_call):
    known = examples(seed, 12, m, ragged=ragged, per_call=per_call)
    graph = Graph.of(known, known.embeddings)
    costs = np.broadcast_to(known.chain.costs.per_call, (12, m))
    right = np.array([[z[i].argmax() == known.chain.labels[i] for z in known.chain.logits] for i in range(12)])
    right = right.astype(float)
    place = 0
    for query in range(12):
        for model in range(m):
            cost = (costs[query, model] - costs.min()) / (np.ptp(costs) or 1.0)
            assert graph.edges[:, place].tolist() == [query, model]
            assert graph.attributes[place].tolist() == pytest.approx([right[query, model], cost, right[query, model]])
            assert graph.targets[place] == (right[query, model] or not right[query].any())
            place += 1
    assert place == graph.edges.shape[1] == len(graph.targets)
    for model, (*one_hot, accuracy, cost) in enumerate(graph.models.tolist()):
        assert one_hot == np.eye(m)[model].tolist()
        assert accuracy == pytest.approx(right[:, model].mean())
        assert cost == pytest.approx(costs[:, model].mean() / costs.mean(axis=0).max())


def test_models_that_cost_nothing_divide_nothing_by_zero():
    known = examples(1, 20, 2)
    free = replace(known, chain=replace(known.chain, costs=Costs("USD", np.zeros(2))))
    graph = Graph.of(free, free.embeddings)
    assert (graph.attributes[:, 1] == 0).all()
    assert (graph.models[:, -1] == 0).all()


def test_one_model_leaves_nothing_to_route():
    fitted = fit_graphrouter(Fitting(examples(3, 80, 1), examples(3, 80, 1, 1)))
    test = examples(3, 80, 1, 2).without_labels()
    answers = fitted.answers(test, fitted.default)
    assert (answers.predictions == test.chain.logits[0].argmax(axis=1)).all()
    assert answers.calls.all()


@pytest.mark.usefixtures("few_epochs")
@pytest.mark.parametrize("paid", [False, True])
@pytest.mark.parametrize("m", [2, 4])
def test_any_number_of_models_and_options_is_routed(m, paid):
    splits = [examples(3, 80, m, at, ragged=True, per_call=True) for at in range(3)]
    if paid:
        splits = [replace(split, embeddings=None) for split in splits]
    fitted = fit_graphrouter(Fitting(*splits[:2]))
    test = splits[2].without_labels()
    values = fitted.cascade.values(test)
    assert values.shape == (80, m)
    assert ((values > 0) & (values <= 1)).all()
    assert ("its call paid" in fitted.note) == paid
    for setting in fitted.points.settings:
        answers = fitted.answers(test, setting)
        chosen = answers.calls.copy()
        if paid:
            assert chosen[:, 0].all()
            chosen[:, 0] &= chosen.sum(axis=1) == 1
        assert (chosen.sum(axis=1) == 1).all()
        own = np.stack([logits.argmax(axis=1) for logits in test.chain.logits], axis=1)
        assert (answers.predictions == own[chosen]).all()


@pytest.mark.usefixtures("few_epochs")
@pytest.mark.parametrize("paid", [False, True])
def test_a_querys_values_do_not_depend_on_those_asked_with_it(paid):
    splits = [examples(4, 60, 3, at, d=37) for at in range(3)]
    if paid:
        splits = [replace(split, embeddings=None) for split in splits]
    router = fit_graphrouter(Fitting(*splits[:2])).cascade.values
    together = router(splits[2])

    @given(st.lists(st.integers(0, 59), min_size=1, max_size=60))
    @settings(max_examples=40)
    def asked(rows):
        assert (router(taken(splits[2], rows)) == together[rows]).all()

    asked()


def taken(split, rows):
    """Return some rows of a split, in any order."""
    data = split.chain
    part = replace(
        data,
        logits=tuple(logits[rows] for logits in data.logits),
        example_ids=tuple(f"{place}-{data.example_ids[row]}" for place, row in enumerate(rows)),
        labels=data.labels[rows],
    )
    return Examples(part, None if split.embeddings is None else split.embeddings[rows])


@pytest.mark.usefixtures("few_epochs")
def test_the_same_seed_fits_the_same_numbers_on_any_number_of_threads():
    splits = [examples(6, 300, 2, at, d=64) for at in range(2)]
    first, again, other = (fit_graphrouter(Fitting(*splits, seed=seed)).cascade.values for seed in (1, 1, 2))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        threaded = fit_graphrouter(Fitting(*splits, seed=1)).cascade.values
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    for name in (field.name for field in fields(first) if field.name not in ("scaling", "vectors")):
        assert np.array_equal(getattr(first, name), getattr(again, name))
        assert np.array_equal(getattr(first, name), getattr(threaded, name))
    assert not np.array_equal(first.weights, other.weights)


def test_the_epoch_of_the_lowest_validation_loss_counts_and_training_stops_after_it(monkeypatch):
    monkeypatch.setattr(graphrouter, "PATIENCE", 50)
    chosen, losses = epochs_of_a_fit(monkeypatch)
    assert losses[chosen] == pytest.approx(min(losses[graphrouter.WARM_UP :]), rel=1e-6)
    assert len(losses) == min(graphrouter.EPOCHS, chosen + graphrouter.PATIENCE + 1)
    # Epochs before the norms know the data do not count, however low their loss.
    monkeypatch.setattr(graphrouter, "WARM_UP", chosen + 1)
    later, losses = epochs_of_a_fit(monkeypatch)
    assert later > chosen
    assert losses[later] == pytest.approx(min(losses[chosen + 1 :]), rel=1e-6)


def epochs_of_a_fit(monkeypatch):
    """Fit, and return which epoch was chosen, and the validation losses of all."""
    calibration, validation = examples(7, 120, 2), examples(7, 120, 2, shift=1)
    tried = []

    def linear(network, graph, fitted=Network.linear):
        tried.append(fitted(network, graph))
        return tried[-1]

    with monkeypatch.context() as patched:
        patched.setattr(Network, "linear", linear)
        router = fit_graphrouter(Fitting(calibration, validation)).cascade.values

    right = validation.correct()
    best = right == right.max(axis=1, keepdims=True)
    vectors = np.float64(router.scaling(router.vectors(validation)))
    losses = []
    for weights, offsets in tried[1:]:  # the first is the untrained network's
        logits = vectors @ np.float64(weights).T + np.float64(offsets)
        losses.append(np.logaddexp(0, np.where(best, -logits, logits)).mean())
    chosen = [place for place, (weights, _) in enumerate(tried[1:]) if np.array_equal(weights, router.weights)]
    return chosen[0], losses
