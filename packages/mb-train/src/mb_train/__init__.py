"""Train dense and Mixture-of-Experts language models.

    config = TrainConfig(**recipe("quickstart"))
    result = mb_train.train.train(config)    # after `import mb_train.train`, which imports torch

`TrainConfig` holds every setting of a run, `recipe` the settings of a named one; `mb-train --help`
explains them.
"""

# Public API that needs no torch; the rest is `mb_train.train`, `mb_train.models.gpt`, ...
from mb_train.config import TrainConfig as TrainConfig
from mb_train.config.recipes import recipe as recipe

__version__ = "0.1.0"
