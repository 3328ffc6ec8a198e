"""Train dense and Mixture-of-Experts language models."""

# Public API that needs no torch; the rest is `mb_train.train`, `mb_train.models.gpt`, ...
from mb_train.config import TrainConfig as TrainConfig
from mb_train.recipes import recipe as recipe

__version__ = "0.1.0"
