"""The extras of the package: which one brings a module that is not installed."""

__all__ = ["EXTRA_OF", "what_to_install"]

EXTRA_OF = {
    **dict.fromkeys(
        (
            "torch",
            "sklearn",
            "skimage",
            "pydantic",
            "safetensors",
            "matplotlib",
            "mpl_toolkits",
            "jinja2",
            "markupsafe",
            "tomli_w",
            "threadpoolctl",
            "filelock",
            "narwhals",
        ),
        "train",
    ),
    "tenseal": "ckks",
    "opacus": "dp",
    "flwr": "flower",
    "nvflare": "nvflare",
    "pyarrow": "parquet",
    "datasets": "huggingface",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "torchvision": "vision",
    "PIL": "vision",
    "transformers": "text",
    "peft": "text",
}
"""The extra of each module that a plain `pip install cflpriv` leaves out."""


def what_to_install(error: ModuleNotFoundError) -> str | None:
    """One line that names the missing module and the extra that brings it; None where no extra does."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(module)
    return None if extra is None else f"needs {module}, which is not installed: pip install 'cflpriv[{extra}]'"
