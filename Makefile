.PHONY: help sync lint type test all gate oldest newest bench docs lock

help:   ## list the targets
	@grep -E '^[a-z]+: *##' $(MAKEFILE_LIST) | sed 's/: *## /\t/'
sync:   ## install everything into .venv
	uv sync
lint:   ## style, imports between packages
	uv run ruff check .
	uv run ruff format --check .
	uv run lint-imports
type:   ## static types
	uv run ty check packages/*/src integration-tests/sweep_*.py
test:   ## the suite on CPU
	uv run pytest
all:    ## and further cases of its sweeps, some 20 minutes more on two cores
	uv run pytest -m "slow or not slow"
gate:   ## compile what is new of the kernels for every GPU; commit the ledger with the kernels
	uv run python -m mb_kernels.targets --ledger packages/mb-kernels/gate.txt
oldest: ## tests that depend on torch's internals, with the oldest supported torch
	python3 tools/other_torch.py oldest
newest: ## those, the kernels' tests and the compile gate, with the newest torch
	python3 tools/other_torch.py newest
bench:  ## every package's benchmarks (needs a GPU)
	failed=0; for b in packages/*/benchmarks/run.py; do uv run python $$b || failed=1; done; exit $$failed
docs:   ## the documentation as pages in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 uv run --only-group docs mkdocs build --strict
lock:   ## resolve anew, keeping versions, and strip every address from uv.lock
	uv lock
	python3 tools/strip_lock.py uv.lock
