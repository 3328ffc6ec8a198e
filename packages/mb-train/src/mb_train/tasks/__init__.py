"""What a run trains, apart from how: its model, its datasets, its batches and its losses."""

from mb_train.tasks.base import Batch as Batch
from mb_train.tasks.base import Dataset as Dataset
from mb_train.tasks.base import Datasets as Datasets
from mb_train.tasks.base import Task as Task
from mb_train.tasks.bert import BertTask as BertTask
from mb_train.tasks.classify import ClassifyTask as ClassifyTask
from mb_train.tasks.gpt import GPTTask as GPTTask
from mb_train.tasks.ict import ICTTask as ICTTask
from mb_train.tasks.make import make_task as make_task
from mb_train.tasks.t5 import T5Task as T5Task
