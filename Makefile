# Commands for developers. The virtual environment is created on first use, and again when setup.cfg has changed.

BIN := .venv/bin
READY := .venv/.ready
DATA := workspaces/word2vec/train_data_dir/word_dict.txt

# The first Python that is new enough, or the one you give: make PYTHON=/opt/python/bin/python3
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo "$$p"; break; }; done)

.PHONY: help demo test test-versions test-others test-labs test-chaos bench test-frameworks test-browser check clean packages

help:
	@echo "make demo    train word2vec on three embedded nodes (installs what is missing)"
	@echo "make test    all tests; ARGS='-k name' selects"
	@echo "make test-versions   tests of the laptop's side with each Python here, the oldest and the newest libraries; ARGS='tests/unit'"
	@echo "make test-chaos   a hundred random faults, half an hour"
	@echo "make test-frameworks   real PyTorch and Paddle, three minutes; the first time it downloads 600 MB"
	@echo "make bench   dispatch compared with rsync and clush on a shaped cluster; ARGS='--only cold-16'"
	@echo "make test-browser   the report's page in Chromium (package chromium)"
	@echo "make check   format, mistakes, types, imports, names"
	@echo "make clean   remove everything that make has created"

demo: $(READY) $(DATA)
	@scripts/demo.sh

# Most of a test is waiting. Labs share nothing, so two of them run beside the others, which take turns on loopback. Then come, two at a
# time, those that can do with a loopback of their own, where the kernel gives us one. One framework runs among the others; the virtual
# environments that tests give to jobs are kept in .frameworks.
ALONE := $(if $(shell unshare --net true 2>/dev/null && echo yes),tests/node tests/unit)

test: $(READY)
	@PYTHON="$(PYTHON)" scripts/frameworks.sh digits-data digits-torch
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-others test-labs

# Pytest's 5: ARGS selected nothing in this half.
test-others: $(READY)
	@$(BIN)/python -m pytest -q --ignore tests/lab $(addprefix --ignore ,$(ALONE)) $(ARGS) || [ $$? = 5 ]

# Shown as one piece, after the end.
test-labs: $(READY)
	@code=0; { \
	$(BIN)/python -m pytest -q -n 2 --dist worksteal tests/lab $(ARGS) || [ $$? = 5 ] || code=1; \
	[ -z "$(ALONE)" ] || OWN_LOOPBACK=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(ALONE) $(ARGS) || [ $$? = 5 ] || code=1; \
	} > .test-labs.log 2>&1; cat .test-labs.log; rm -f .test-labs.log; exit $$code

test-versions: | packages
	@scripts/test-versions.sh $(ARGS)

# The stories first, two at a time since they mostly wait; then what is measured, with nothing beside it.
test-chaos: $(READY)
	@code=0; $(BIN)/python -m pytest -q -n 2 tests/lab/test_chaos.py -m "chaos or not chaos" $(ARGS) || code=$$?; \
	$(BIN)/python -m pytest -q -m chaos --ignore tests/lab/test_chaos.py $(ARGS) || code=$$?; exit $$code

test-frameworks: export DEMAND_FRAMEWORKS := 1
test-frameworks: $(READY)
	@PYTHON="$(PYTHON)" scripts/frameworks.sh digits-data digits-torch digits-paddle paddle-ps
	@$(BIN)/python -m pytest -q tests/frameworks -m "frameworks or not frameworks" $(ARGS)

test-browser: $(READY)
	@$(BIN)/python -m pytest -q -ra tests/browser $(ARGS)

# All of them, so that one run shows all findings.
check: $(READY)
	@code=0; \
	$(BIN)/ruff check --quiet || code=1; \
	$(BIN)/ruff format --quiet --diff || code=1; \
	$(BIN)/mypy --no-error-summary || code=1; \
	PYTHONPATH=. $(BIN)/lint-imports --no-logo || code=1; \
	$(BIN)/python scripts/check-structure.py || code=1; \
	$(BIN)/python scripts/check-words.py || code=1; \
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
	@$(BIN)/python -m compileall -q clustertool  # Invoke lets nobody do so later, and each start would compile what it imports
	@touch $@

$(DATA): workspaces/word2vec/prepare.py | $(READY)
	@$(BIN)/python $<
