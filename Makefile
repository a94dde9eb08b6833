# Everything starts from Python >= 3.11 and make alone: .venv is made, the pinned packages go in, then the job runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS := 1
# compiled modules are kept: test workers would compile the tests again in every run
unexport PYTHONDONTWRITEBYTECODE

# real data sets lie beside the checkout where there are any; tests that need them skip, with a word, elsewhere
ifndef CFLPRIV_DATA
ifneq ($(wildcard ../shared/data),)
export CFLPRIV_DATA := $(abspath ../shared/data)
endif
endif

.PHONY: demo test test-flower test-slow lint type bench gpu gpu-kit docs dist clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu and not flower"

test-flower: $(READY)
	$(BIN)/python -m pytest -m flower

test-slow: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/proselint --config .proselintrc.json check $$(git ls-files '*.md')

type: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks

# with gpu_kit/ where it is there, and the packages that PYTHON has: no environment is made and nothing is installed
OUT ?= gpu_report
BUDGET ?= 480
gpu:
	PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m benchmarks gpu --out $(OUT) --budget $(BUDGET)

# what a machine with a device lacks: wheels and Fashion-MNIST, in gpu_kit/
gpu-kit: $(READY)
	$(BIN)/python -m benchmarks gpu-kit

# the site in site/: complete without a network, and any warning is an error
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site: site/index.html"

dist: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

$(VENV)/.docs $(VENV)/.release: $(VENV)/.%: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$*]"
	touch $@

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "cflpriv needs Python 3.11 or newer; set PYTHON=python3.X"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,flower,nvflare]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
