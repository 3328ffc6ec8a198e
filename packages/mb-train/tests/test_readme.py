"""The README's example runs as printed; its recipes and its tree are those there are."""

import re
from pathlib import Path

from mb_train.config.recipes import RECIPES

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def test_readme_example(capsys, tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["scores"].isfinite().all()
    # Loaded once: `mb-train eval` encodes each text of a file by it.
    assert names["trained"].tokenizer is names["trained"].tokenizer
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"loss 10\.\d\d -> \d+\.\d\d, kept in runs/quickstart/iter_0000004", last)


def test_recipes_are_named():
    (row,) = re.findall(r"^\| `recipe\(name\)` \|(.*)$", README, flags=re.MULTILINE)
    named = set(re.findall(r"`([\w-]+)`", row))
    named |= {f"{kind}-17m" for kind in ("dense", "dmoe", "moe")} | {
        f"{model}-quickstart" for model in ("bert", "t5", "ict")
    }
    for kind, smallest, largest in re.findall(r"`(\w+)-(\w+)` to `\1-(\w+)`", row):
        sizes = [name.split("-")[1] for name in RECIPES if re.fullmatch(f"{kind}-[0-9]+m", name)]
        assert sizes[-1] == largest
        named |= {f"{kind}-{size}" for size in sizes[sizes.index(smallest) :]}
    named |= {f"{name}-1gpu" for name in named if name.startswith("dense-")}
    named -= {"-1gpu", "17m", "bert-", "t5-", "ict-"}
    assert named == set(RECIPES)


def test_the_tree_names_every_module_and_room():
    (tree,) = re.findall(r"```\nsrc/mb_train/\n(.*?)```", README, flags=re.DOTALL)
    source = Path(__file__).parents[1] / "src/mb_train"
    there = {path.name for path in source.glob("*.py")} - {"__init__.py", "__main__.py"}
    there |= {f"{path.name}/" for path in source.iterdir() if any(path.glob("*.[ps][yh]"))}
    named = re.findall(r"\b\w+(?:\.py|/)(?!\S)", tree)
    assert sorted(named) == sorted(there)
