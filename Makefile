# Everything starts from Python >= 3.11 and make alone: .venv is made, the pinned packages go in, then the job runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEFAULT_SUITE := -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not flower"
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

.PHONY: demo test test-versions FORCE test-flower test-kernels test-slow lint words type bench gpu gpu-kit docs dist clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest $(DEFAULT_SUITE)

# the default suite with the lowest versions that pyproject.toml allows (VERSIONS=lowest), or with the newest (VERSIONS=newest), under PYTHON
VERSIONS ?= lowest
EXTRAS ?= dev flower nvflare
VERSIONS_ENV := .versions/$(VERSIONS)-$(notdir $(PYTHON))
comma := ,
empty :=
space := $(empty) $(empty)

test-versions: $(VERSIONS_ENV)/$(VERSIONS).txt
	$(VERSIONS_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --constraint $< --editable ".[$(subst $(space),$(comma),$(EXTRAS))]"
	$(VERSIONS_ENV)/bin/python -m pip list --disable-pip-version-check --format freeze --exclude-editable > $(VERSIONS_ENV)/installed.txt
	$(VERSIONS_ENV)/bin/python -m pytest $(DEFAULT_SUITE)

# uv derives the lowest versions from the bounds in pyproject.toml; where the lowest has no wheel for PYTHON: the lowest that has one.
# pip installs, with its own settings: PIP_EXTRA_INDEX_URL, for instance, names an index with another build of torch.
%/lowest.txt: FORCE
	$(PYTHON) -m venv --clear $*
	$*/bin/python -m pip install --quiet --disable-pip-version-check uv
	$*/bin/uv pip compile --quiet --python $*/bin/python --resolution lowest-direct --only-binary :all: $(addprefix --extra ,$(EXTRAS)) --output-file $@ pyproject.toml

%/newest.txt: FORCE
	$(PYTHON) -m venv --clear $*
	touch $@

FORCE:

test-flower: $(READY)
	$(BIN)/python -m pytest -m flower

# the tests that compute, under the kernels of other processors; KERNELS=--quick as CI does
test-kernels: $(READY)
	$(BIN)/python tests/kernels.py $(KERNELS)

test-slow: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/proselint --config .proselintrc.json check $$(git ls-files '*.md')

# words of README.md and docs/ that are written by hand, by page
words: $(READY)
	$(BIN)/python tests/words.py

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
	@test -e cflpriv/engine/libnative.so || echo "no C++ compiler: the engine trains with torch alone, about half as fast"
	touch $(READY)

clean:
	rm -rf $(VENV) .versions build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
