# Everything runs inside a virtual environment of the checkout; nothing needs root.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# A stamp for each extra. A larger one also makes the stamps of those that it contains.
STAMP  := $(VENV)/.installed-all
SMALL  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-demo
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Page tests need a browser; where there is none, make says so and leaves only them out.
BROWSER := $(firstword $(shell command -v chromium chromium-browser google-chrome 2>/dev/null))
# RocketMQ and Kafka run as real servers, whose programs Maven brings; so do the jars of Delta Lake, Iceberg and S3.
MAVEN   := $(and $(shell command -v java),$(firstword $(shell command -v mvn)))
QUICK   := not soak and not slow$(if $(BROWSER),, and not browser)
SLOW    := slow and not soak$(if $(BROWSER),, and not browser)$(if $(MAVEN),, and not rocketmq and not kafka and not lake)
# Tests wait as well as compute, so more of them than cores run side by side; 0 runs them one after the other.
WORKERS ?= 4

# Tests start some thousand Python processes; without cached bytecode each of them compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install install-all demo test removal gate oracle sizes slow matrix matrix-postgres matrix-mariadb lint format docs proof bench bench-quick goals tables faults clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(SMALL) ## Create the virtual environment for a change of the core: tests, ruff, mypy (95 MB to download)

install-all: $(STAMP) ## Also install what all other targets need: Spark, RocketMQ and Kafka clients, Sphinx (790 MB)

$(BIN)/python:
	@echo 'Creating a virtual environment in $(VENV).'
	@$(PYTHON) -m venv $(VENV)

$(SMALL): setup.py pyproject.toml | $(BIN)/python
	@echo 'Installing the project and the tools for a change of the core into $(VENV): some 95 MB to download.'
	@$(PIP) --editable '.[dev]'
	@touch $@

$(STAMP): setup.py pyproject.toml | $(BIN)/python
	@echo 'Installing the project and all tools into $(VENV): some 790 MB to download, most of it for Spark.'
	@$(PIP) --editable '.[dev-all]'
	@touch $(SMALL) $(DEMO) $@

$(DEMO): setup.py pyproject.toml | $(BIN)/python
	@echo 'Installing what the demo needs into $(VENV): Django, Celery, a private PostgreSQL (some 50 MB to download).'
	@echo 'For its report, the demo then installs Spark, another 590 MB; without the report: $(BIN)/python -m sample_project.demo --no-reconcile.'
	@$(PIP) --editable '.[demo]'
	@touch $@

demo: $(DEMO) ## An order service on real parts: orders flow, crashes are survived, a report proves it (KEEP=1 leaves the site up, LONG=1 also deploys a new version of an event)
	@KEEP='$(KEEP)' LONG='$(LONG)' $(BIN)/python -m sample_project.demo

# Otherwise each worker of the first run compiles all that the tests import. Errors are reported by the run itself.
$(VENV)/.compiled: $(STAMP)
	-@$(BIN)/python -m pytest -p no:cacheprovider --collect-only -qq >/dev/null
	@touch $@

test: $(VENV)/.compiled ## Every guarantee, on real servers and processes (PART=saga: the tests of one part)
	$(if $(BROWSER),,@echo 'No Chromium on the PATH: the page tests are left out.')
	tests=$(if $(PART),`$(BIN)/python -m tests.house.parts '$(PART)'`) && \
	$(BIN)/python -m pytest -m '$(QUICK)' -n $(WORKERS) --durations 40 --durations-min 4 $$tests

# Without each part: imports, checks, the quick start, types. Without any part: the core's suite. It uses no part, so this
# says as much as a copy for each part would.
removal: $(STAMP) ## The core without its parts (PART=saga: without this one)
	$(if $(PART),,$(BIN)/python -m tests.house.removal --all)
	$(BIN)/python -m tests.house.removal $(if $(PART),'$(PART)',--together) --suite --workers $(WORKERS)

# Its tests compute a third of their time. They wait for a process that starts, a lease that ends, a server that is back.
gate: WORKERS := 5
# CI names the suites that rest on what has changed, for example AND='rocketmq or spark'.
gate: $(STAMP) ## Of the slow tests, those that every change has to pass: planted faults and kill points
	$(BIN)/python -m pytest -m '($(SLOW)) and gate and (not (rocketmq or kafka or spark or proof)$(if $(AND), or $(AND)))' -o spark_workers=2 -n $(WORKERS) --durations 40 --durations-min 10

slow: $(STAMP) ## What takes long: more combinations, longer histories, RocketMQ and Kafka
	$(if $(BROWSER),,@echo 'No Chromium on the PATH: the page tests are left out.')
	$(if $(MAVEN),,@echo 'No Java and Maven on the PATH: the tests of the RocketMQ engine, Kafka, Delta Lake, Iceberg and S3 are left out.')
	$(BIN)/python -m pytest -m '$(SLOW)' -o spark_workers=2 -n $(WORKERS) --durations 40 --durations-min 10

matrix: ## The core suites on the oldest and on the newest Python, Django, psycopg and Celery
	WORKERS='$(WORKERS)' .ci/matrix oldest newest

matrix-postgres: $(STAMP) ## The core suites on PostgreSQL 15, 16, 17 and 18
	WORKERS='$(WORKERS)' .ci/matrix postgres-15 postgres-16 postgres-17 postgres-18

matrix-mariadb: $(STAMP) ## The suites of an application's database on MariaDB
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[mariadb]'
	WORKERS='$(WORKERS)' .ci/matrix mariadb

lint: $(STAMP) ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sizes: ## Lines by room, and how much there is to know
	@$(PYTHON) -m tests.house.sizes

bench: $(STAMP) ## Measure throughput and latency on this machine (nothing else should be running)
	$(BIN)/python -m benchmarks.web_peers --install
	$(BIN)/python -m benchmarks

goals: $(STAMP) ## The figures of the goals in docs/maintainers/performance.md, in 25 minutes (SLOWED=1: on a slowed machine)
	$(BIN)/python -m benchmarks.web_peers --install
	$(BIN)/python -m benchmarks.goals $(if $(SLOWED),--slowed)

tables: $(STAMP) ## Print the stored figures into docs/maintainers and docs/operations/sizing.md
	$(BIN)/python -m benchmarks.tables

bench-quick: $(STAMP) ## The web job beside its peers in eight minutes, with a picture (var/bench-quick.svg)
	$(BIN)/python -m benchmarks.web_peers --install
	$(BIN)/python -m benchmarks.quick

faults: $(STAMP) ## The longest runs: every fault many times
	$(BIN)/python -m pytest -m soak --timeout 1800
	OUTBOX_MISTAKES=8000 $(BIN)/python -m pytest -m slow -n $(WORKERS) tests/mistakes/test_programs.py
	$(BIN)/python -m tests.house.removal --all --suite --workers $(WORKERS)

oracle: $(STAMP) ## Random storms, judged from outside by their histories: ten minutes (SECONDS=180, HOURS=2)
	$(BIN)/python -W ignore -m tests.oracle --total $(if $(HOURS),$$(($(HOURS) * 3600)),$(or $(SECONDS),600))

proof: $(BIN)/python ## The models of the protocols, and that their broken variants are caught: seven minutes (needs Spin and a C compiler)
	$(BIN)/python -m tests.proof

docs: $(STAMP) ## The site of the documents, into var/site/index.html; a warning fails
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs var/site
	@echo 'Open var/site/index.html: the site works without a server, its search too.'

format: $(SMALL) ## Put the code into its format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean: ## Remove what make made
	rm -rf $(VENV) build dist var *.egg-info
