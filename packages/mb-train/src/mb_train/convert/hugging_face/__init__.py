"""Models in Hugging Face's format: config.json, safetensors and a tokenizer's files."""

from mb_train.convert.hugging_face.read import import_model as import_model
from mb_train.convert.hugging_face.read import read_model as read_model
from mb_train.convert.hugging_face.write import export_model as export_model
