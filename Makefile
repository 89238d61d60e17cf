# Where pip finds its packages is pip's own setting: with PIP_EXTRA_INDEX_URL set to PyTorch's CPU index
# (or PIP_FIND_LINKS to a folder of wheels), Linux gets the small CPU build of torch instead of the CUDA one.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
COMMA := ,

.DEFAULT_GOAL := help
.PHONY: help setup demo test everything lint docs docs-serve docs-check package mutants fuzz long faults models trainers packed compat unpinned bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## build .venv and install ringspan into it

# A line when a step begins, and its time; pip's own lines are for whom it fails.
INSTALL_LOG := .venv/install.log
define step
	@printf '%s  %s ... ' "$$(date +%H:%M:%S)" $(1); started=$$(date +%s); \
	if ($(2)) >$(INSTALL_LOG) 2>&1; then echo "$$(($$(date +%s) - started)) s"; \
	else echo failed; cat $(INSTALL_LOG) >&2; exit 1; fi
endef

# The stamp comes last, so that a finished installation is never repeated and an interrupted one is.
# torch comes first and pinned: left to the resolver, a newer build could bring gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ringspan needs Python 3.11 or newer, '$(PYTHON)' is not: try 'make $(MAKECMDGOALS) PYTHON=python3.11'" >&2; exit 1; }
	@mkdir -p .venv
	$(call step,"making .venv",$(BIN)/python -m pip --version || "$(PYTHON)" -m venv .venv)
	$(call step,"installing torch$(COMMA) a minute or more by the network",$(BIN)/python -m pip install torch==2.13.0 -c constraints.txt)
	$(call step,"installing ringspan and what it needs$(COMMA) another few",$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt)
	@touch $@

# A step whose own lines are shown: what it does at once, its seconds at the end.
define shown
	@printf '%s  %s\n' "$$(date +%H:%M:%S)" $(1); started=$$(date +%s); $(2); status=$$?; \
	printf '%s  %s in %s s\n' "$$(date +%H:%M:%S)" "$$([ $$status = 0 ] && echo done || echo failed)" $$(($$(date +%s) - started)); \
	exit $$status
endef

demo: $(STAMP) ## show exact ring attention at work on this machine
	$(call shown,"demo: the same model on one process and on a ring of two",$(BIN)/ringspan demo $(ARGS))

# Three steps (tests/tiers.py): what one process computes; what needs ranks or models, of which one worker has all that
# needs the pool; what fails when others take its time, alone. With a process for each core, threads of PyTorch would only
# wait for each other. More than four workers would not help: one has the longest part.
WORKERS := --numprocesses=logical --maxprocesses=4 --dist=loadgroup
PLAIN := -m "not alone and not seeded and not long"
test: $(STAMP) ## run the tests in three steps (ARGS="-k ring -x" goes to one pytest)
ifdef ARGS
	$(BIN)/pytest $(ARGS)
else
	$(call shown,"step 1 of 3: what one process computes (one to two minutes on two cores)",OMP_NUM_THREADS=1 $(BIN)/pytest --tier a $(PLAIN) $(WORKERS))
	$(call shown,"step 2 of 3: what needs ranks or models (about twelve minutes on two slow cores)",OMP_NUM_THREADS=1 $(BIN)/pytest --tier b $(PLAIN) $(WORKERS))
	$(call shown,"step 3 of 3: what must run alone (a minute)",$(BIN)/pytest -m "alone and not long" $$(grep -rl "mark\.alone" tests --include="test_*.py"))
endif

everything: $(STAMP) ## run what the tests leave out, one target after the other, and write what each saw to build/everything.md (hours)
	$(BIN)/python -m tests.everything $(ARGS)

lint: $(STAMP) ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

docs: $(STAMP) ## build the site into build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

docs-serve: docs ## show the site on http://127.0.0.1:8000 (PORT=8001 for another port)
	$(BIN)/python -m http.server $(or $(PORT),8000) --bind 127.0.0.1 --directory build/docs

docs-check: $(STAMP) ## run the Python and the commands of every page in short form, and look at every page in a browser (about fifteen minutes)
	RINGSPAN_DOCS=1 OMP_NUM_THREADS=1 $(BIN)/pytest --timeout=300 tests/docs $(ARGS)

package: $(STAMP) ## build wheel and sdist into dist, and check what is in them
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m tests.package dist

mutants: $(STAMP) ## plant bugs, one at a time, and see that the test named for each fails (three minutes; SAMPLE=12 for the day's)
	RINGSPAN_SAMPLE=$(SAMPLE) RINGSPAN_DAY=$$(date +%j) OMP_NUM_THREADS=1 $(BIN)/pytest -m seeded tests/mutants $(ARGS)

fuzz: $(STAMP) ## run the property tests with 25 times as many, new, random examples, then options at random (RINGSPAN_DRAWS=2000, RINGSPAN_SECONDS, RINGSPAN_SEED)
	RINGSPAN_FUZZ=$${RINGSPAN_FUZZ:-25} $(BIN)/pytest -m hypothesis --timeout=7200 $(ARGS); properties=$$?; \
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.combinations.run && exit $$properties

long: $(STAMP) ## run what the tests leave out: more cases of models, trainers and commands, prompts of 5,000 tokens
ifdef ARGS
	OMP_NUM_THREADS=1 $(BIN)/pytest -m long --timeout=900 $(WORKERS) $(ARGS)
else
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "long and not alone" --timeout=900 $(WORKERS)
	$(BIN)/pytest -m "long and alone" --timeout=900
endif

faults: $(STAMP) ## strike real jobs with kills, signals and damage (ARGS="kill save"); leave the machine alone meanwhile
	$(BIN)/python -m tests.faults.run $(ARGS)

models: $(STAMP) ## try every language model of transformers on the ring and write docs/models.md (ARGS="llama")
	$(BIN)/python -m tests.every_model.run $(ARGS)
	$(BIN)/python -m tests.every_model.weights $(ARGS)

trainers: $(STAMP) ## train on rings and on one process, and write the table of docs/trainers.md
	$(BIN)/python -m tests.hf.table

packed: $(STAMP) ## run the tests of packed weights, which need torchao
	$(BIN)/python -m pip install -q torchao==0.18.0
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/torch/model/test_packed.py tests/hf/test_sft.py tests/train/test_optimizer.py $(ARGS)

# The oldest releases that the trainers support beside each other; the newest are those of constraints.txt.
compat: ## run the trainers' tests with the oldest transformers and PyTorch that they support, in .venv-oldest
	@[ -x .venv-oldest/bin/python ] || "$(PYTHON)" -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -q torch==2.11.0
	.venv-oldest/bin/python -m pip install -q -e '.[hf,lightning]' transformers==5.17.0 trl==1.16.0 peft \
		pillow pytest pytest-timeout pytest-xdist hypothesis
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest tests/hf tests/lightning $(ARGS)

# What is known to fail there is skipped by the tests themselves, which say of which releases.
unpinned: ## run the tests of models and trainers with the newest releases there are, however pip is capped (ARGS="--torch 2.14.1")
	"$(PYTHON)" -m tests.versions $(ARGS)

bench: $(STAMP) ## measure what docs/performance.md quotes (ARGS="attention"); leave the machine alone meanwhile
	$(BIN)/python benchmarks/run.py $(ARGS)

clean: ## remove caches and build outputs; .venv and runs/ stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
