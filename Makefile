VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo test check mutants docs format clean

demo: $(STAMP)
	@$(PY) -m tmm_core.tools.demo

test: $(STAMP)
	$(PY) -m pytest -n 2

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_layout.py

# Minutes, and so not part of `test`: a process of pytest for each of some hundred small bugs.
# NAMES="key plan" runs those whose names begin so.
mutants: $(STAMP)
	$(PY) tests/mutants/run.py $(NAMES)

# A site of docs/ with the API, in site/.
docs: $(STAMP)
	$(PY) -m pip install -q -r docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Rebuilt only when what is installed changes; the constraints pin development
# to one torch and one Triton, the package itself keeps ranges.
$(STAMP): pyproject.toml constraints.txt requirements-dev.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt -r requirements-dev.txt
	$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) dist build site .mypy_cache .ruff_cache .pytest_cache
