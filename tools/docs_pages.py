"""Hook of mkdocs: the repository's own files are the pages, so that no text is written twice.

Every file keeps its path, so links between Markdown files mean the same here and in the repository.
Files that pages link to and that are no Markdown (examples, Dockerfiles) are served as they are.
The reference of a package is one page with the docstrings of its public modules.
"""

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "README.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "docs/*",
    "packages/*/*.md",
    "packages/*/docs/*",
    "packages/*/docker/*",
    "packages/*/examples/*.py",
    "packages/*/benchmarks/results/*",
    "packages/*/src/*/vocabularies/NOTICE",
)
# The public modules of each package; `__init__` first, then rooms with an interface of their own.
REFERENCE = {
    "mb_kernels": ["testing"],
    "mb_layers": ["compat", "transformers"],
    "mb_parallel": [
        *("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"),
        *("optimizer", "recompute", "offload", "random", "testing"),
    ],
    "mb_data": ["maintenance"],
    "mb_train": [
        *("train", "loading", "models.gpt", "schedule"),
        *("checkpoint.read", "checkpoint.saver", "logs.megatron_lines"),
    ],
}


def exports(module: str) -> list[str]:
    """What a package re-exports by `from ... import name as name`, in its order."""
    package, _, inside = module.partition(".")
    source = ROOT / "packages" / package.replace("_", "-") / "src" / package / inside
    init = source / "__init__.py"
    if not init.exists():
        return []  # a plain module: its members are its own
    imports = [
        node for node in ast.parse(init.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    return [alias.name for node in imports for alias in node.names if alias.name == alias.asname]


def reference(package: str) -> str:
    """A page of directives: each public module's docstring, then what can be imported from it."""
    lines = [f"# Reference of {package}"]
    for module in (package, *(f"{package}.{module}" for module in REFERENCE[package])):
        names = exports(module)
        options = "    options: {members: false}" if names else "    options: {heading_level: 2}"
        lines += [f"::: {module}\n{options}"]
        lines += [f"::: {module}.{name}\n    options: {{heading_level: 3}}" for name in names]
    return "\n\n".join(lines)


def on_files(files: Files, *, config: Any) -> Files:
    """Replace what mkdocs found in `docs_dir` by the repository's files, at their own paths."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for package in REFERENCE:
        uri = f"reference/{package}.md"
        files.append(File.generated(config, uri, content=reference(package)))
    return files
