"""State dicts whose tensors are made when they are asked for."""

import pytest
import torch
from mb_layers.on_demand import Changed, OnDemand, Picked, outlines
from mb_layers.state_dicts import Rule, Translation, reversed_rules, translate, translate_back

RULES = [
    Rule("both", ("a", "b"), lambda a, b: torch.cat([a, b]), lambda t: t.split([2, 3])),
    Rule("same", ("c",)),
    Rule("more", ("d",), lambda d: torch.cat([d, torch.ones(1, d.shape[1])]), lambda t: [t[:-1]]),
]
SOURCE = {
    "a": torch.randn(2, 4),
    "b": torch.randn(3, 4),
    "c": torch.randn(0),
    "d": torch.randn(1, 4),
}
NAMES = ["both", "same", "more"]


class Files(OnDemand[torch.Tensor]):
    """Tensors of a source, and which were read."""

    def __init__(self, source):
        super().__init__()
        self.places, self.seen = dict(source), []

    def read(self, place):
        self.seen.append(next(name for name, t in self.places.items() if t is place))
        return place

    def outlines(self):
        return {name: tensor.to("meta") for name, tensor in self.places.items()}


def test_a_tensor_is_read_when_it_is_asked_for():
    files = Files(SOURCE)
    translated = Translation(Changed(files, lambda _, t: t.double()), RULES, NAMES)
    picked = Picked({f"x.{name}": (translated, name) for name in translated})
    about = picked.outlines()
    assert "x.both" in picked
    assert files.seen == []  # neither for shapes nor for names
    want = translate(SOURCE, RULES, NAMES)
    for name in NAMES:
        files.seen.clear()
        found = picked[f"x.{name}"]
        assert torch.equal(found, want[name].double())
        outline = about[f"x.{name}"]
        assert (outline.shape, outline.dtype, outline.device.type) == (
            found.shape,
            found.dtype,
            "meta",
        )
        assert files.seen == list(next(rule.sources for rule in RULES if rule.target == name))


def test_the_way_back_is_the_inverse():
    there = translate(SOURCE, RULES, NAMES)
    back = translate_back(there, RULES, list(SOURCE))
    assert back.keys() == SOURCE.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in SOURCE.items())
    assert [rule.target for rule in reversed_rules(RULES)] == list(SOURCE)


def test_what_is_lost_is_said_before_anything_is_read():
    files = Files({**SOURCE, "e": torch.ones(1)})
    with pytest.raises(ValueError, match="of the source that nothing uses: e"):
        Translation(files, RULES, NAMES)
    assert files.seen == []
    with pytest.raises(ValueError, match="used more than once: c"):
        Translation(SOURCE, [*RULES, Rule("again", ("c",))], [*NAMES, "again"])
    shared = Translation(SOURCE, [*RULES, Rule("again", ("c",))], [*NAMES, "again"], shared=True)
    assert torch.equal(shared["again"], SOURCE["c"])


def test_outlines_of_tensors_in_memory():
    about = outlines({"a": torch.ones(3, 2, dtype=torch.bfloat16).mT})
    assert (about["a"].shape, about["a"].dtype) == ((2, 3), torch.bfloat16)
    assert about["a"].is_meta
