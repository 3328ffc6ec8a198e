"""The configuration of a run: fields that know of themselves, in groups, flat in `TrainConfig`."""

# The public API.
from mb_train.config.field import flag_name as flag_name
from mb_train.config.field import whole as whole
from mb_train.config.train_config import GROUPS as GROUPS
from mb_train.config.train_config import TrainConfig as TrainConfig
