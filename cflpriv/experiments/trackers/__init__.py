"""Callbacks for programs that show runs: TensorBoard, MLflow, and Weights & Biases. Each needs the extra of its name."""

from . import mlflow, tensorboard, wandb

__all__ = ["mlflow", "tensorboard", "wandb"]
