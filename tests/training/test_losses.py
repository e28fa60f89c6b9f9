import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.training import losses


def batch(targets, weights):
  return {
    "targets": jnp.array(targets),
    "weights": jnp.array(weights, jnp.float32),
  }


def test_classification_sums_by_hand():
  logits = jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]))
  total, sums = losses.classification(
    logits, batch([1, 0, 1], [1, 1, 0]), jnp.array([0.5, 0.25, 9.0])
  )
  want = -np.log(0.75) - np.log(0.5)
  np.testing.assert_allclose(sums["loss"], want, rtol=1e-6)
  np.testing.assert_allclose(total, want + 0.75, rtol=1e-6)
  assert sums["objective"] == total
  assert (sums["correct"], sums["count"]) == (2, 2)


def test_classification_ignores_padding_that_is_not_finite():
  logits = jnp.array([[0.0, 1.0], [jnp.nan, jnp.nan]])
  total, sums = losses.classification(
    logits, batch([1, 0], [1, 0]), jnp.array([0.0, jnp.inf])
  )
  assert np.isfinite(total)
  assert np.isfinite(sums["loss"])
  assert sums["count"] == 1


def test_sown_losses_sum_by_example():
  sown = {"a": {"x": (jnp.array([1.0, 2.0]),)}, "b": (jnp.array([0.5, 0.5]),)}
  np.testing.assert_allclose(losses.sown_losses(sown, 2), [1.5, 2.5])
  np.testing.assert_allclose(losses.sown_losses({}, 2), [0, 0])


def test_sown_losses_of_pairs_are_their_mean():
  total = losses.sown_losses({"a": jnp.array([1.0, 3.0, 5.0, 9.0])}, 2)
  assert total.tolist() == [2.0, 7.0]


LOGITS = jnp.log(jnp.array([[0.2, 0.8], [0.6, 0.4], [0.9, 0.1]]))


def test_classification_minimises_smoothed_labels_and_reports_plain_loss():
  own, extra = batch([1, 0, 1], [1, 1, 0]), jnp.zeros(3)
  total, sums = losses.classification(LOGITS, own, extra, 0.1)
  plain = -np.log([0.8, 0.6])
  spread = -np.log([[0.2, 0.8], [0.6, 0.4]]).mean(1)
  np.testing.assert_allclose(sums["loss"], plain.sum(), rtol=1e-6)
  want = (0.9 * plain + 0.1 * spread).sum()
  np.testing.assert_allclose(total, want, rtol=1e-6)


def test_classification_of_mixed_images_has_two_classes():
  own = batch([1, 0, 1], [1, 1, 1])
  own |= {"others": jnp.array([0, 1, 0]), "shares": jnp.array([0.7, 0.4, 0.5])}
  total, sums = losses.classification(LOGITS, own, jnp.zeros(3))
  want = -(0.7 * np.log(0.8) + 0.3 * np.log(0.2))
  want -= 0.4 * np.log(0.6) + 0.6 * np.log(0.4)
  want -= 0.5 * np.log(0.1) + 0.5 * np.log(0.9)
  np.testing.assert_allclose(total, want, rtol=1e-6)
  assert sums["correct"] == 1  # The greater share: 1, 1 and 1.


def test_classification_counts_top5_from_100_classes():
  logits = jnp.arange(100.0)[None] * jnp.ones((3, 1))
  _, sums = losses.classification(
    logits, batch([99, 95, 94], [1, 1, 1]), jnp.zeros(3)
  )
  assert (sums["correct"], sums["correct_top5"]) == (1, 2)
  means = losses.classification_means(sums)
  assert means["accuracy_top5"] == pytest.approx(2 / 3)


def test_language_perplexity_is_exp_of_the_mean_over_tokens():
  log_p = jnp.log(jnp.array([[0.5, 0.25], [0.125, 1.0]]))
  own = {"weights": jnp.array([[1.0, 1.0], [1.0, 0.0]])}
  total, sums = losses.language(log_p, own, jnp.array([1.0, 2.0]))
  np.testing.assert_allclose(sums["loss"], 6 * np.log(2), rtol=1e-6)
  np.testing.assert_allclose(total - sums["loss"], 3, rtol=1e-5)
  means = losses.language_means(sums)
  assert means["perplexity"] == pytest.approx(4)
  assert means["count"] == 3
  assert (
    losses.language_means({"loss": 1e5, "count": 1})["perplexity"] == np.inf
  )
  with pytest.raises(ValueError, match=r"label_smoothing=0.1"):
    losses.language(log_p, own, jnp.zeros(2), 0.1)


def test_token_classification_by_hand():
  """Three sequences of three tokens; the last one is padding."""
  p = np.full((3, 3, 4), 0.1)
  for row, best in enumerate([[1, 2, 3], [0, 0, 0], [0, 0, 0]]):
    p[row, range(3), best] = 0.7
  targets = [[1, 2, 0], [0, 1, 0], [0, 0, 0]]
  weights = [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
  total, sums = losses.token_classification(
    jnp.log(p), batch(targets, weights), jnp.array([0.5, 0.25, 9.0])
  )
  want = -4 * np.log(0.7) - np.log(0.1)
  np.testing.assert_allclose(sums["loss"], want, rtol=1e-6)
  np.testing.assert_allclose(total, want + 0.75, rtol=1e-6)
  means = losses.token_means(sums)
  assert means["count"] == 2
  assert means["loss"] == pytest.approx(want / 5, rel=1e-6)
  assert means["accuracy"] == pytest.approx(4 / 5)
  assert means["scaled_accuracy"] == pytest.approx((0.8 - 0.25) / 0.75)
  # The first sequence is right; guesses are with 1 / 16 and with 1 / 64.
  assert means["sequence_accuracy"] == 0.5
  guess = (1 / 16 + 1 / 64) / 2
  assert means["scaled_sequence_accuracy"] == pytest.approx(
    (0.5 - guess) / (1 - guess)
  )


def test_token_classification_ignores_tokens_without_a_label():
  logits = jnp.array([[[0.0, 1.0], [jnp.nan, jnp.nan]]])
  total, sums = losses.token_classification(
    logits, batch([[1, 0]], [[1, 0]]), jnp.zeros(1)
  )
  assert np.isfinite(total)
  assert (sums["correct"], sums["right_sequences"]) == (1, 1)


def test_segmentation_mean_iou_by_hand():
  # Class 3 is neither labelled nor predicted, class 2 predicted alone.
  targets = jnp.array([[[0, 0, -1], [1, 1, 1]], [[0, 1, 0], [0, 0, 0]]])
  predicted = jnp.array([[[0, 1, 0], [1, 1, 2]], [[3, 3, 3], [3, 3, 3]]])
  logits = 9.0 * (predicted[..., None] == jnp.arange(5))
  own = {"targets": targets, "weights": jnp.array([1.0, 0.0])}
  _, sums = losses.segmentation(logits, own, jnp.zeros(2))
  means = losses.segmentation_means(sums)
  # 0: 1 of 2. 1: 2 of 4. 2: 0 of 1.
  assert means["mean_iou"] == pytest.approx((1 / 2 + 2 / 4 + 0) / 3)
  assert means["accuracy"] == pytest.approx(3 / 5)
  assert means["count"] == 1
  want = -np.log(np.exp([9, 0, 9, 9, 0]) / (np.exp(9) + 4)).mean()
  assert means["loss"] == pytest.approx(want, rel=1e-5)


def test_segmentation_ignores_images_without_labels():
  own = {"targets": -jnp.ones((1, 2, 2), int), "weights": jnp.ones(1)}
  total, sums = losses.segmentation(jnp.ones((1, 2, 2, 3)), own, jnp.zeros(1))
  assert total == 0
  assert losses.segmentation_means(sums)["mean_iou"] == 0


def test_spans_by_hand():
  """Both ends count half; an answer is right if both of its ends are."""
  p = jnp.array([[[0.5, 0.25], [0.25, 0.5], [0.25, 0.25]]] * 3)
  total, sums = losses.spans(
    jnp.log(p),
    batch([[0, 1], [0, 2], [2, 2]], [1, 1, 0]),
    jnp.zeros(3),
  )
  want = -np.log(0.5) - (np.log(0.5) + np.log(0.25)) / 2
  np.testing.assert_allclose(total, want, rtol=1e-6)
  assert (sums["correct"], sums["count"]) == (1, 2)
  means = losses.LOSSES["spans"].means(sums)
  assert means == {"loss": pytest.approx(want / 2), "accuracy": 0.5, "count": 2}


def test_sentences_contrastive_loss_by_hand():
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(4, 2, 3))
  unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
  # The last pair is padding: neither found nor a wrong choice of others.
  cosines = (unit[:3, 0] @ unit[:3, 1].T) / 0.05
  shares = np.exp(cosines - cosines.max(1, keepdims=True))
  shares /= shares.sum(1, keepdims=True)
  rows = {"weights": jnp.array([1.0, 1.0, 1.0, 0.0])}
  vectors = jnp.asarray(vectors, jnp.float32)
  total, sums = losses.sentences(vectors, rows, jnp.zeros(4))
  np.testing.assert_allclose(total, -np.log(np.diag(shares)).sum(), rtol=1e-4)
  assert sums["correct"] == (cosines.argmax(1) == np.arange(3)).sum()
  assert sums["count"] == 3
  # With scores of people, the error of the cosine.
  scores = jnp.array([0.2, 0.9, 1.0, jnp.nan])
  total, sums = losses.sentences(
    vectors, rows | {"scores": scores}, jnp.zeros(4)
  )
  want = np.square((unit[:3, 0] * unit[:3, 1]).sum(1) - scores[:3]).sum()
  np.testing.assert_allclose(total, want, rtol=1e-4)
  assert "accuracy" not in losses.LOSSES["sentences"].means(sums)


@pytest.mark.parametrize("name", ["spans", "sentences"])
@pytest.mark.slow
def test_losses_without_classes_refuse_label_smoothing(name):
  with pytest.raises(ValueError, match="label_smoothing=0.1"):
    losses.LOSSES[name].sums(jnp.ones((2, 2, 2)), {}, jnp.zeros(2), 0.1)
