# `make train` and `make test` set up the environment themselves; they need git, make and Python >= 3.12.

PYTEST_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
LIBTPU := .venv/libtpu/.installed
SUITES := .venv/.suites
NEXT := .cache/next/.installed

# Tests and their subprocesses share compiled programs. Python's bytecode is written even if the environment disables
# it, as in containers: without bytecode, each process takes three seconds longer to import jaxrl.
CACHE_ENV := JAX_COMPILATION_CACHE_DIR="$(CURDIR)/.cache/jax" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Tests spend most of their time compiling: without LLVM's optimizations they take a quarter less time. Tests that
# compare programs bit by bit, marked `exact`, run again in test-rest, compiled with the default optimizations.
QUICKLY := $(CACHE_ENV) JAX_DISABLE_MOST_OPTIMIZATIONS=1
REST := long and not exhaustive and not learning and not endurance
EXACT := exact and not exhaustive and not learning and not endurance
FURTHER := exhaustive and not learning and not endurance

.PHONY: train test test-rest test-all test-next exhaustive learning zoo faults bench docs dist lint lock setup clean

train: $(STAMP)  ## Train PPO on CartPole.
	$(BIN)/jaxrl train --preset purejaxrl-cartpole --seed 0 --run-dir runs/make-train

test: $(STAMP)  ## Run the quick tests: a few minutes on two cores.
	$(QUICKLY) $(PYTEST) $(PYTEST_ARGS)

test-rest: $(STAMP) $(SUITES) | $(LIBTPU)  ## Run the tests that `make test` omits, except for long training runs.
	code=0; $(CACHE_ENV) $(PYTEST) -rs -m "$(EXACT)" $(PYTEST_ARGS) || [ $$? -eq 5 ] || code=1; \
	$(QUICKLY) $(PYTEST) -rs -m "$(REST) and not exact" $(PYTEST_ARGS) || code=1; exit $$code

test-all:  ## Run the tests that CI always runs: the quick tests and test-rest.
	$(MAKE) test
	$(MAKE) test-rest

exhaustive: $(STAMP) $(SUITES) | $(LIBTPU)  ## Run more cases of the tests in test-rest: every algorithm, sampler, page and kind of kill.
	code=0; $(CACHE_ENV) $(PYTEST) -rs -m "$(FURTHER) and exact" $(PYTEST_ARGS) || [ $$? -eq 5 ] || code=1; \
	$(QUICKLY) $(PYTEST) -rs -m "$(FURTHER) and not exact" $(PYTEST_ARGS) || code=1; exit $$code

test-next: $(NEXT)  ## Run the quick tests with the newest JAX and Gymnasium, in a separate environment, .cache/next.
	$(QUICKLY) $(patsubst $(BIN)/%,.cache/next/bin/%,$(PYTEST)) $(PYTEST_ARGS)

learning: $(STAMP) $(SUITES)  ## Run long training runs that must reach a score.
	$(CACHE_ENV) $(BIN)/python -m pytest -q -rs -m learning $(PYTEST_ARGS)

# BUDGET: minutes; a later call resumes unfinished rows and continues with those not yet trained.
BUDGET ?= 60

zoo: $(STAMP) $(SUITES)  ## Train the rows of benchmarks/zoo.toml that fit into BUDGET minutes, and update docs/zoo.md.
	$(CACHE_ENV) $(BIN)/python benchmarks/zoo.py --budget $(BUDGET)

# FAULTS_MINUTES: duration of each memory test; FAULTS_KILLS: maximum kills per kind of run; FAULTS_MUTATIONS: mutations
# per kind of file; FAULTS_PRESSES: signals sent during the first 30 seconds of commands.
FAULTS_MINUTES ?= 120
FAULTS_KILLS ?= 50
FAULTS_MUTATIONS ?= 300
FAULTS_PRESSES ?= 200

faults: $(STAMP)  ## Test a hundred kills, 200 signals, memory over hours and thousands of corrupt files: seven hours on two cores.
	$(CACHE_ENV) FAULTS_MINUTES="$(FAULTS_MINUTES)" FAULTS_KILLS="$(FAULTS_KILLS)" \
		FAULTS_MUTATIONS="$(FAULTS_MUTATIONS)" FAULTS_PRESSES="$(FAULTS_PRESSES)" $(BIN)/python -m pytest -q -rs -s -m endurance tests/faults $(PYTEST_ARGS)

bench: $(STAMP)
	for script in benchmarks/[a-z]*.py; do $(BIN)/python "$$script" || exit 1; done

docs: $(STAMP)  ## Build the documentation site in build/docs/site; every warning is an error.
	rm -rf build/docs
	mkdir -p build/docs
	cp -R docs jaxrl zensical.toml CHANGELOG.md CONTRIBUTING.md build/docs
	cd build/docs && ../../$(BIN)/zensical build --strict  # in a copy, since zensical uses a folder .cache next to it
	$(BIN)/python scripts/write_llms.py build/docs/site

dist: $(STAMP)  ## Build the source distribution and, from it, the wheel, in dist.
	rm -rf dist
	$(BIN)/python -m jaxrl.cli.table
	$(BIN)/uv build --quiet --python $(BIN)/python --no-build-isolation --out-dir dist
	ls dist

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python .venv

lock: $(STAMP)  ## Update the locked dependencies to the newest versions that pyproject.toml allows.
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.12 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-annotate --no-config --custom-compile-command "make lock" \
		--extra brax --extra envpool --extra data --extra flashbax --extra export --extra hub --extra ray --extra search --extra tune --extra video --extra test --extra docs --extra dev pyproject.toml --output-file requirements.lock
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.12 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-annotate --no-config --custom-compile-command "make lock" \
		--constraints requirements.lock --extra suites pyproject.toml --output-file requirements-suites.lock
	echo libtpu | $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.12 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-annotate --no-config --custom-compile-command "make lock" \
		--output-file requirements-tpu.lock -

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml scripts/make_venv.sh scripts/find_python.sh
	sh scripts/make_venv.sh
	$(BIN)/python -m jaxrl.cli.table
	touch $@

# The suites of JAX environments (the extra `suites`), which `make test` does not need: a gigabyte.
$(SUITES): requirements-suites.lock $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements-suites.lock || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-suites.lock
	touch $@

# The compiler for TPUs, in a separate folder: if installed normally, JAX would look for TPUs at every start.
$(LIBTPU): requirements-tpu.lock $(STAMP)
	rm -rf .venv/libtpu
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --target .venv/libtpu \
		-r requirements-tpu.lock && touch $@ || echo "the compiler for TPUs cannot be installed: its tests are skipped"

$(NEXT): requirements-next.txt pyproject.toml $(STAMP)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .cache/next
	$(BIN)/uv pip install --quiet --python .cache/next/bin/python --override requirements-next.txt \
		--editable ".[brax,envpool,data,export,hub,ray,search,tune,video,flashbax,test,docs,dev]"
	touch $@

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
