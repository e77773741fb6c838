# make demo | quick | test | peers | check | soak | bench | release: each installs what it needs first; a second
# call is fast.
PYTHON ?= python3
# TORCH=2.13 installs that version instead of the pinned one, in an environment of its own. A version of torch may name
# the one sympy it works with.
TORCH ?=
OTHER_TORCH := $(if $(TORCH),s/^torch==.*/torch==$(TORCH)/;/^sympy==/d)
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

NUMPY1 := .venv-numpy1

.PHONY: demo quick test peers check soak bench release install system clean

# Four epochs of the default recipe, and a page to look at.
demo: install
	@folder=runs/demo-$$(date +%Y%m%d-%H%M%S); \
	$(BIN)/allstep train epochs=4 schedule.warmup=1 --out $$folder && $(BIN)/allstep report $$folder

# While writing: what needs neither processes nor waiting, about a minute and a half on 2 cores.
quick: install check
	$(BIN)/python -m pytest -m unit --numprocesses 2 --dist worksteal

# Three at a time on 2 cores: many tests wait, for a timeout, the end of a process or another rank.
test: install check
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

# Random and killing tests at full count; the last lines go into docs/soak.md.
soak: install
	ALLSTEP_SOAK=1 $(BIN)/python -m pytest -m soak --timeout 1800 --numprocesses 2 --dist worksteal

# MXNet's tests on the last numpy that MXNet was made for; `make test` runs them on the current one.
peers: system $(NUMPY1)/.installed
	$(NUMPY1)/bin/python -m pytest tests/mxnet

check: install
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/changelog check
	$(BIN)/python tools/check-words

bench: install
	$(BIN)/allstep bench launch

# Version, changelog, sdist and wheel, commit and tag, all of it local: make release VERSION=0.1.0
release: install
	@$(BIN)/python tools/release $(VERSION)

install: system $(STAMP)

system:
	@tools/system-packages

# tf-keras names the package tensorflow, and mxnet an old numpy: both run on what is installed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed -e '$(OTHER_TORCH)' constraints.txt >$(VENV)/constraints.txt
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt hatchling editables
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --no-build-isolation --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps tf-keras==2.21.0 mxnet==1.9.1
	touch $(STAMP)

# allstep asks for a newer numpy, so it comes without its dependencies, and those that MXNet's tests
# need come by name.
$(NUMPY1)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NUMPY1)
	sed -e 's/^numpy==.*/numpy==1.23.5/' constraints.txt >$(NUMPY1)/constraints.txt
	$(NUMPY1)/bin/pip install --quiet --constraint $(NUMPY1)/constraints.txt \
		numpy torch cloudpickle platformdirs psutil pydantic PyYAML requests rich safetensors typer \
		hypothesis pytest pytest-timeout hatchling editables
	$(NUMPY1)/bin/pip install --quiet --no-build-isolation --no-deps --editable .
	$(NUMPY1)/bin/pip install --quiet --no-deps mxnet==1.9.1
	touch $(NUMPY1)/.installed

clean:
	rm -rf .venv .venv-numpy1 .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache
