"""One of Hugging Face's architectures: what it takes to read and to write its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.quantized import check_quantization
from mb_train.models.config import TransformerConfig

# Names of Llama and its relatives.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROPE = "rope_parameters"
# What tensors do that predict tokens beyond the next in a way that is not DeepSeek's.
GUESSES = "it guesses tokens beyond the next, ours do not"
Rules: TypeAlias = Callable[[TrainConfig, TransformerConfig], list[Rule]]


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """None where the tokenizer has none: their classes have numbers of their own for that."""
    return {
        "bos_token_id": tokenizer.special.get("bos"),
        "eos_token_id": tokenizer.special.get("eod"),
        "pad_token_id": tokenizer.special.get("pad"),
    }


class Modules(NamedTuple):
    """Modules of an architecture's files that predict tokens beyond the next one.

    count: how many a config.json with all settings tells of; 0, too, where they are none of ours.
    begin: how the names of their tensors begin, of module k = 0, 1, ...
    read: they are DeepSeek's in what they compute, and ours (`models.mtp`).
    with_ends: what is written holds the embedding and the head once more for each of them.
    """

    count: Callable[[Json], int]
    begin: Callable[[Json, int], tuple[str, ...]]
    read: bool = True
    with_ends: bool = True


def layers_behind(setting: str) -> Modules:
    """Layers behind the last, counted by a setting."""
    return Modules(
        lambda config: config[setting] or 0,
        lambda config, k: (f"model.layers.{config['num_hidden_layers'] + k}.",),
    )


@dataclass(frozen=True)
class Architecture:
    """One of Hugging Face's model types.

    Attributes:
        name: of its class.
        fields: from its config.json to fields of a `TrainConfig`.
        config: back; None: a model like it is written as another that computes the same.
        rules: from its tensors to ours.
        stacked: the same where the experts of a layer are one tensor; None: without experts.
        packed: the same where their matrices are in MXFP4; None: they never are.
        back: from our tensors to its; None: the inverse of `rules`.
        defaults: what the class has for settings that a config.json leaves out.
        aliases: other names of settings, and which these are.
        inside: settings that hold further ones, which count as if they stood beside them.
        prefix: of its tensors' names, but the head's.
        left_out: patterns of tensors that files may hold and that say nothing.
        modules: for further tokens, which files may hold, and the model does without.
        beside: patterns of tensors that files may hold beside the model, and what these do.
        shared: one tensor may hold parts of several of ours.
        copies: tensors that files may hold once more under another name, and which these are.
        renamed: patterns of names that some files have, and what stands in their place today.
        special: special tokens of its config.json, from a tokenizer.
    """

    model_type: str
    name: str
    fields: Callable[[Json], dict[str, Any]]
    config: Callable[[TrainConfig], dict[str, Any]] | None
    rules: Rules
    stacked: Rules | None = None
    packed: Rules | None = None
    back: Rules | None = None
    defaults: Json = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    prefix: str = ""
    left_out: tuple[str, ...] = ()
    modules: Modules | None = None
    beside: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    special: Callable[[Any], dict[str, Any]] = special_tokens

    def read(self, config: Json) -> dict[str, Any]:
        """Fields of a `TrainConfig` from a config.json, by whatever names it has its settings.

        Raises:
            ValueError: something that our models have not.
            KeyError: a size that is not there.
            TypeError: a number that is none.
        """
        refuse(config, per_layer_config=(None,))
        check_quantization(config, mxfp4=self.packed is not None)
        settled = self.settled(config)
        # Of what is drawn later: the head of a classifier, routers of an upcycled model.
        drawn = {"init_method_std": settled.get("initializer_range", 0.02)}
        fields = drawn | self.fields(settled)
        _check_turned(fields)
        if self.modules is not None and self.modules.read:
            fields["mtp_num_layers"] = len(range(self.modules.count(settled)))  # not below 0
        return fields

    def settled(self, config: Json) -> dict[str, Any]:
        """A config.json with its settings by one name each, and those that it leaves out.

        Raises:
            ValueError: a setting has one value by one name and another by the other.
        """
        for name in self.inside:
            config = {**(config.get(name) or {}), **config}
        for alias, name in self.aliases.items():
            if alias in config and config.get(name, config[alias]) != config[alias]:
                raise ValueError(
                    f"Expected {alias} and {name} of config.json, two names of one setting, to be "
                    f"alike, got {config[alias]!r} and {config[name]!r}. Leave one out."
                )
        renamed = {self.aliases[n]: value for n, value in config.items() if n in self.aliases}
        # Every class takes rotations of null for ones that are left out.
        given = {n: value for n, value in config.items() if (n, value) != (_ROPE, None)}
        return {**self.defaults, **given, **renamed}


def _check_turned(fields: Mapping[str, Any]) -> None:
    """Raise ValueError if what of each head turns is no number of pairs."""
    width = fields.get("kv_channels")  # None of latent attention, which has a size for that part
    if fields.get("position_embedding_type") != "rope" or width is None:
        return
    turned = int(width * fields["rotary_percent"])
    if turned % 2 or not turned:
        raise ValueError(
            "Expected config.json to leave an even number of channels of a head, 2 or more, to "
            f"turn, got {turned}: this model has something that ours lack."
        )


def copies_of_ends(begin: str, head: str) -> dict[str, str]:
    """What files may hold once more for a module for further tokens, and which tensors these are.

    Args:
        begin: how the names of its tensors begin.
        head: the name of the head's weight.
    """
    return {f"{begin}embed_tokens.weight": EMBEDDING, f"{begin}shared_head.head.weight": head}
