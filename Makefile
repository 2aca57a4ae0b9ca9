# Thin targets over the project's own commands: make demo, make test.
# PYTHON names the interpreter to set up with, VENV the environment's folder.
PYTHON ?= python3
VENV ?= .venv
DEMO_DIR ?= runs/demo_enfr
DEMO_FLAGS ?=
RUN := $(VENV)/bin/python
SOURCES := setup.py pyproject.toml requirements_lock.txt

.PHONY: setup demo test lint build_files

# What the commands need.
setup: $(VENV)/.installed

# Trains on the built-in English-French demo, scores it, exports it and asks the exported model.
demo: $(VENV)/.installed
	$(RUN) bin/train --task=demo_enfr --n=2 --model_dir=$(DEMO_DIR) $(DEMO_FLAGS)
	$(RUN) bin/evaluate --model_dir=$(DEMO_DIR) --split=test --beam_size=1,4
	$(RUN) bin/export --model_dir=$(DEMO_DIR) --export_dir=$(DEMO_DIR)/export
	$(RUN) examples/ask.py $(DEMO_DIR)/export "Today is Sunday, April 19, 1992."

test: lint
	$(RUN) -m pytest -q --numprocesses=auto --dist=loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# After a file or an import was added, moved or deleted.
build_files: $(VENV)/.installed
	$(RUN) tools/gen_build.py

define install
	@echo "Installing into $(VENV): about 3 GB, a few minutes ..."
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check \
		--constraint requirements_lock.txt --editable '.$(1)'
	@touch $@
endef

$(VENV)/.installed: $(SOURCES)
	$(call install,)

$(VENV)/.installed-test: $(SOURCES)
	$(call install,[test])
