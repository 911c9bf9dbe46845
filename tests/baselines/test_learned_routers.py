"""The training loop, and what each learned method computes: features, formulas, losses, what it must predict."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import changed, examples, problem, scores, values_of, vectors_of
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score
from synthetic import seeds, softmax

from cauc_ray.baselines.networks import model_vectors
from cauc_ray.baselines.networks.graph import Graph, Network
from cauc_ray.baselines.networks.model_vectors import clusters, sample_model_loss, sample_sample_loss
from cauc_ray.baselines.networks.training import Schedule, train
from cauc_ray.policies.features import Scaler, unit_rows
from cauc_ray.policies.method import METHODS


def walk(validation_loss, schedule, **how):
    """Train one weight from 0 towards 1, a tenth a step, and return it with the validation losses."""
    network = torch.nn.Module()
    network.weight = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = (lambda rows: -network.weight.sum()), (lambda: validation_loss(network.weight))
    checked = train(network, optimiser, *losses, 10, schedule, torch.Generator().manual_seed(0), **how)
    assert not network.training
    return network.weight.item(), checked


@pytest.mark.parametrize("check_every", [1, 2, 3])
def test_the_weights_of_the_best_check_are_kept_and_patience_ends_training(check_every):
    schedule = Schedule(batch_size=4, n_steps=1000, check_every=check_every, patience=2)
    weight, losses = walk(lambda w: (w - 0.62) ** 2, schedule)
    weights = 0.1 * check_every * np.arange(1, len(losses) + 1)
    np.testing.assert_allclose(losses, ((weights - 0.62) ** 2), atol=1e-5)
    assert weight == pytest.approx(weights[losses.argmin()], abs=1e-5)
    assert len(losses) == losses.argmin() + 1 + schedule.patience


@pytest.mark.parametrize(
    ("loss", "schedule", "options", "expected", "n_checks"),
    [
        (lambda w: torch.zeros(()), Schedule(4, 30, 5, 1), {}, 3.0, 6),  # nothing to choose by: the last weights
        (lambda w: w, Schedule(4, 1000, 1, 3, warm_up=5), {}, 0.6, 9),  # of the first after the warm-up, the sixth
        (lambda w: -w.sum(), Schedule(4, 10, 1, 1), {"gradient_norm": 0.5}, 0.5, 10),  # long gradients are scaled down
    ],
)
def test_equal_losses_a_warm_up_and_a_gradient_norm(loss, schedule, options, expected, n_checks):
    weight, losses = walk(loss, schedule, **options)
    assert weight == pytest.approx(expected, abs=1e-5)
    assert len(losses) == n_checks


def test_embeddings_have_length_one_whatever_their_encoder_gives():
    fitting, test = problem(0, n=50, n_test=50)
    router = METHODS["routellm-sw"].family(fitting)
    longer = replace(test, embeddings=40 * test.embeddings)
    np.testing.assert_allclose(vectors_of(router, longer), test.embeddings, rtol=1e-5)
    assert (unit_rows(np.array([[0.0, 0.0], [3.0, 4.0]])) == [[0.0, 0.0], [0.6, 0.8]]).all()


def test_its_probabilities_are_those_of_a_logistic_regression_for_each_model(monkeypatch):
    monkeypatch.setattr(model_vectors, "EMBED_RATE", 1e-3)
    monkeypatch.setattr(model_vectors, "EMBED_STEPS", 300)
    fitting, test = problem(1)
    values = values_of(METHODS["embedllm"].family(fitting), test)
    for model, right in enumerate(fitting.calibration.correct().T):
        oracle = LogisticRegression(C=10.0).fit(fitting.calibration.embeddings, right)
        expected = oracle.predict_proba(test.embeddings)[:, 1]
        assert np.corrcoef(values[:, model], expected)[0, 1] > 0.99
        assert values[:, model].mean() == pytest.approx(test.correct()[:, model].mean(), abs=0.05)


@given(seeds, st.integers(2, 9))
def test_the_sample_model_loss_is_that_of_a_loop(seed, m):
    rng = np.random.default_rng(seed)
    similarities = rng.uniform(-1, 1, (5, m)).astype(np.float32)
    quality = np.where(rng.random((5, m)) < 0.5, rng.random((5, m)), 0.0).astype(np.float32)
    total = 0.0
    for similarity, right in zip(similarities, quality, strict=True):
        order = sorted(range(m), key=lambda j: -right[j])
        n_contrasted = min(3, m // 2)
        worst = [j for j in order[m - n_contrasted :] if right[j] <= 0.5]
        for j in order[:n_contrasted]:
            if right[j] > 0:
                total -= np.log(softmax([similarity[j], *similarity[worst]])[0])
    loss = sample_model_loss(torch.from_numpy(similarities), torch.from_numpy(quality))
    assert loss.item() == pytest.approx(total / 5, abs=1e-5)


@given(seeds)
def test_the_sample_sample_loss_is_that_of_a_loop(seed):
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((6, 5, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    terms = [-np.log(softmax([row[0] @ pair for pair in row[1:]])[0]) for row in vectors.astype(float)]
    loss = sample_sample_loss(torch.from_numpy(vectors[:, 0]), torch.from_numpy(vectors[:, 1:]))
    assert loss.item() == pytest.approx(np.mean(terms), abs=1e-5)


@pytest.mark.parametrize(("n", "d", "expected"), [(1, 9, 1), (15, 9, 1), (16, 9, 2), (40, 2, 5), (500, 9, 8)])
def test_clusters_that_lie_apart_are_separated_and_few_queries_make_few(n, d, expected):
    drawn = clusters(np.random.default_rng(0).standard_normal((n, d)).astype(np.float32), 0)
    assert (drawn.shape, len(np.unique(drawn))) == ((n,), expected)
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(8), 20)
    centres = np.pad(10 * np.linalg.qr(rng.standard_normal((8, 8)))[0][:, :5], ((0, 0), (0, 25)))
    vectors = centres[truth] + 0.01 * rng.standard_normal((160, 30))
    assert adjusted_rand_score(truth, clusters(vectors.astype(np.float32), 0)) == 1.0


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
    nodes, new = examples(seed, 0, n=25, m=m), examples(seed, 1, n=7, m=m)
    scaler = Scaler.of(nodes.embeddings)
    graph = Graph.of(nodes, scaler(nodes.embeddings))
    generator = torch.Generator().manual_seed(seed)
    network = Network(graph, generator)
    for _ in range(3):  # so that the norms have statistics of their own
        network.models(graph, network.queries(graph), torch.randperm(25 * m, generator=generator)[: 12 * m])
    network.eval()
    weights, offsets = (numbers.detach().numpy() for numbers in network.linear(graph))
    logits = scaler(new.embeddings) @ weights.T + offsets
    assert 1 / (1 + np.exp(-logits)) == pytest.approx(message_passing(network, graph, scaler(new.embeddings)), abs=1e-4)


def predicted_gains(fitted, test):
    """Return the gains of which the policy compares 1 / (1 + exp(g)), float (N, stages - 1)."""
    worth = scores(fitted, test)[:, :-1]
    return np.log(1 / worth - 1)


def test_every_stage_predicts_the_gain_of_the_last_model():
    """The model in the middle says what the first says: deferring to the next alone would never gain."""

    def repeated(part):
        first, _, last = part.chain.logits
        return replace(part, chain=replace(part.chain, logits=(first, first, last)))

    fitting, test = problem(3, n=1000, m=3)
    gains = predicted_gains(METHODS["post-hoc-embed"].family(changed(fitting, repeated)), repeated(test))
    right = test.correct().astype(float)
    for stage in (0, 1):
        predicted, gained = gains[:, stage], right[:, 2] - right[:, 0]
        assert np.corrcoef(predicted, gained)[0, 1] > 0.4
        for low, high in np.quantile(predicted, [[0.0, 0.3], [0.3, 0.7], [0.7, 1.0]]):
            rows = (predicted >= low) & (predicted <= high)
            assert abs(gained[rows].mean() - predicted[rows].mean()) < 0.1
