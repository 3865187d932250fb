VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
PIP := -m pip install -q
# Tests start hundreds of processes, which would compile all modules and rewrite all asserts again.
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/.installed

.PHONY: demo test check oldest newest release-check mutants docs format clean

demo: $(STAMP)
	@$(PY) examples/demo.py

# Slow tests are left out. SLOW=3/8 adds part 3 of 0 to 7, and SLOW=0/1 adds all: some 45 minutes on two cores.
# LESS: further options of pytest; CI leaves out what `make check` ran.
# Three processes for two cores: one often waits for the process that compiles for it. Torch's threads would wait for each
# other by spinning, which takes twice the time.
SLOW = 0/0
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 3 --dist worksteal --slow $(SLOW) $(LESS)

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/codespell
	$(PY) -m pytest -q tests/test_layout.py tests/test_words.py

# The oldest torch and Triton that are supported, and the newest, each in an environment of its own, and the tests
# that tell most of them. Without a GPU nothing else tells whether their Gluon compiles the Hopper kernel. These
# torches have no build for CPUs on the index: 3 GB to fetch, 7 on disk.
oldest newest: %: .venv-%/.installed
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -q -n 2 --dist worksteal -p no:cacheprovider \
		-W "ignore:Conversion of an array:DeprecationWarning" $(TESTS) $(TESTS_$*) --slow 0/1 \
		-k "not slow or fused_work_compiles and (silu or scales) or groups_compile"

TESTS = tests/core/test_compat.py tests/core/test_api.py tests/core/test_launch.py tests/core/test_releases.py \
	tests/core/test_spellings.py::test_a_compiled_call_is_compiled_again_for_another_epilogue \
	tests/plugins/test_triton_kernels.py \
	tests/plugins/test_warp_specialized.py::test_fused_work_compiles_for_hopper \
	tests/plugins/test_ragged_hopper.py::test_groups_compile_for_hopper
TESTS_newest = tests/plugins/test_mixed_input.py::test_weights_go_through_registers_without_waits_or_spills \
	tests/plugins/test_arithmetic.py tests/core/test_experts.py tests/core/test_stored_experts.py
TESTS_oldest = tests/core/test_plan.py tests/core/test_unusual.py tests/core/test_autograd.py \
	tests/plugins/test_ports.py

# The newest Transformers, too.
MORE_newest = transformers accelerate

.venv-oldest/.installed .venv-newest/.installed: .venv-%/.installed: pyproject.toml constraints-%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(PIP) -c constraints-$*.txt torch triton numpy pluggy \
		platformdirs filelock msgspec pebble pytest pytest-timeout pytest-xdist hypothesis hatchling editables \
		$(MORE_$*)
	.venv-$*/bin/python $(PIP) --no-deps --no-build-isolation -e .
	touch $@

# Builds what would be released and runs the quick tests against the wheel alone.
release-check: $(STAMP)
	$(PY) $(PIP) -c constraints.txt twine
	$(PY) .ci/release_check.py

# Minutes, and so not part of `test`: a process of pytest for each of some hundred small bugs.
# NAMES="key plan" runs those whose names begin so.
mutants: $(STAMP)
	$(PY) tests/mutants/run.py $(NAMES)

# A site of docs/ with the API, in site/.
docs: $(STAMP)
	$(PY) $(PIP) -r docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Rebuilt only when what is installed changes; the constraints pin development
# to one torch and one Triton, the package itself keeps ranges.
$(STAMP): pyproject.toml constraints.txt requirements-dev.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) $(PIP) -c constraints.txt -r requirements-dev.txt
	$(PY) $(PIP) -c constraints.txt --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest dist build site .mypy_cache .ruff_cache .pytest_cache
