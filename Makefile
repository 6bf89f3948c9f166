# `make demo` and `make test` set themselves up: a virtual environment and one install, done once, and again
# when pyproject.toml changes or an algorithm is added. The stacks are described in README.md.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3,$(shell command -v $(p) >/dev/null 2>&1 && $(p) -c '' 2>/dev/null && echo $(p))))
PYTHON312 ?= $(firstword $(foreach p,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12),$(shell $(p) -c '' 2>/dev/null && echo $(p))))
WORKERS ?= 2
TESTS ?= # some files or folders of them; all without it
# The installed package lists its algorithms: a file more or less there, and it is installed again.
STAMP := .installed-$(shell ls composer_speedups/algorithms/*.py | cksum | cut -d' ' -f1)
# uv leaves bytecode to the first import, and where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process
# would compile torch, SciPy and all others again: half of the time that it takes to start.
INSTALL = pip install --quiet --compile-bytecode
# Each worker computes on one core; two that use all cores each only stand in each other's way.
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

.PHONY: help setup setup-modern setup-newest demo test test-modern test-newest test-all try bench lint clean

help:
	@echo "make demo         fine-tune a small BERT with and without the speed-ups; prints the table (5 to 6 minutes on 2 cores)"
	@echo "make test         the tests, on the pinned stack"
	@echo "make test-modern  the same tests on torch 2.11 and transformers 5 (Python 3.12)"
	@echo "make test-newest  and on torch 2.15 and transformers 5.24"
	@echo "make try SPEEDUP=low_precision_norm    what a new or changed speed-up must pass, some minutes"
	@echo "make bench        side-by-side measurements against what else one would use"
	@echo "make lint         ruff"

setup: .venv/$(STAMP)
setup-modern: .venv-modern/$(STAMP)
setup-newest: .venv-newest/$(STAMP)

.venv/$(STAMP): pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 not found; name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.5"
	.venv/bin/uv $(INSTALL) --python .venv/bin/python --editable ".[dev]"
	@rm -f .venv/.installed-*
	@touch $@

.venv-modern/$(STAMP) .venv-newest/$(STAMP): .venv-%/$(STAMP): pyproject.toml setup.py requirements/%.txt
	@test -n "$(PYTHON312)" || { echo "error: Python 3.12 not found; name one: make PYTHON312=/path/to/python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON312) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.5"
	.venv-$*/bin/uv $(INSTALL) --python .venv-$*/bin/python --override requirements/$*.txt --editable ".[dev]"
	@rm -f .venv-$*/.installed-*
	@touch $@

demo: setup
	@.venv/bin/composer-speedups ablate demo --out runs/demo
	@echo "Next, for a model of your own: .venv/bin/composer-speedups recommend --help"

test: setup
	$(call PYTEST,.venv)

test-modern: setup-modern
	$(call PYTEST,.venv-modern)

test-newest: setup-newest
	$(call PYTEST,.venv-newest)

test-all: setup
	$(call PYTEST,.venv) -m "slow or not slow"

# Those that find a speed-up by its key, and its own: the promises, neighbours, ranks, other families, memory.
try: setup
	@test -n "$(SPEEDUP)" || { echo "error: name one: make try SPEEDUP=low_precision_norm"; exit 2; }
	$(call PYTEST,.venv) tests/test_*.py tests/recipes tests/measurement $(wildcard tests/algorithms/test_$(SPEEDUP)*.py) \
		-m "slow or not slow" -k "$(SPEEDUP) or registry or test_recipes or flow_one_way or the_table"

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

clean:
	rm -rf .venv .venv-modern .venv-newest build *.egg-info

bench: setup
	.venv/bin/python -m benchmarks.run
