"""A task for the parameter server: scikit-learn's 1797 handwritten digits, and a network with one hidden layer.

Shapes: B samples of a batch, P pixels, H hidden units, C classes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lp_pipe.programs.options import require

Vector = NDArray[np.float64]
Labels = NDArray[np.int64]

_NUM_CLASSES = 10
_NUM_TEST = 360


@dataclass(frozen=True)
class Digits:
    """Images of 8 x 8 pixels between 0 and 1, and the digits that they show."""

    train_images: Vector
    train_labels: Labels
    test_images: Vector
    test_labels: Labels
    seed: int = 0
    num_hidden: int = 64
    batch_size: int = 32

    def initial_parameters(self) -> Vector:
        """Return hidden weights and biases, then output weights and biases, in one vector."""
        rng = np.random.default_rng(self.seed)
        num_pixels = self.train_images.shape[1]
        hidden_PH = rng.normal(0, np.sqrt(2 / num_pixels), (num_pixels, self.num_hidden))
        output_HC = rng.normal(0, np.sqrt(2 / self.num_hidden), (self.num_hidden, _NUM_CLASSES))
        parts = (hidden_PH, np.zeros(self.num_hidden), output_HC, np.zeros(_NUM_CLASSES))
        return np.concatenate([part.ravel() for part in parts])

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        """Return the gradient of the mean cross entropy of a batch that seed, step and rank select."""
        rng = np.random.default_rng((self.seed, step, rank))
        batch = rng.choice(len(self.train_labels), self.batch_size, replace=False)
        images_BP, labels_B = self.train_images[batch], self.train_labels[batch]
        _, _, output_HC, _ = self._layers(parameters)
        activations_BH, scores_BC = self._forward(parameters, images_BP)
        error_BC = _softmax(scores_BC)
        error_BC[np.arange(len(labels_B)), labels_B] -= 1
        error_BC /= len(labels_B)
        error_BH = (error_BC @ output_HC.T) * (activations_BH > 0)
        parts = (images_BP.T @ error_BH, error_BH.sum(0), activations_BH.T @ error_BC, error_BC.sum(0))
        return np.concatenate([part.ravel() for part in parts])

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        """Return the accuracy and mean cross entropy on the test images."""
        _, scores_BC = self._forward(parameters, self.test_images)
        accuracy = (scores_BC.argmax(1) == self.test_labels).mean()
        probabilities_B = _softmax(scores_BC)[np.arange(len(self.test_labels)), self.test_labels]
        return {"test_accuracy": float(accuracy), "test_loss": float(-np.log(probabilities_B).mean())}

    def _forward(self, parameters: Vector, images_BP: Vector) -> tuple[Vector, Vector]:
        hidden_PH, bias_H, output_HC, bias_C = self._layers(parameters)
        activations_BH = np.maximum(images_BP @ hidden_PH + bias_H, 0)
        return activations_BH, activations_BH @ output_HC + bias_C

    def _layers(self, parameters: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        num_pixels, num_hidden = self.train_images.shape[1], self.num_hidden
        sizes = (num_pixels * num_hidden, num_hidden, num_hidden * _NUM_CLASSES)
        hidden, bias_H, output, bias_C = np.split(parameters, np.cumsum(sizes))
        return hidden.reshape(num_pixels, num_hidden), bias_H, output.reshape(num_hidden, _NUM_CLASSES), bias_C


def load_digits(seed: int = 0) -> Digits:
    """Load the data set that comes with scikit-learn; the test images are the same for every seed.

    Raises:
        ModuleNotFoundError: scikit-learn is missing; the message says what to install.
    """
    data = require("sklearn.datasets", "scikit-learn").load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = data.data[order] / 16, data.target[order]
    return Digits(images[_NUM_TEST:], labels[_NUM_TEST:], images[:_NUM_TEST], labels[:_NUM_TEST], seed)


def _softmax(scores_BC: Vector) -> Vector:
    powers_BC = np.exp(scores_BC - scores_BC.max(1, keepdims=True))
    probabilities_BC: Vector = powers_BC / powers_BC.sum(1, keepdims=True)
    return probabilities_BC
