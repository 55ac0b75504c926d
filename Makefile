# Every target but clean first makes .venv, which takes minutes once.
BIN := .venv/bin
READY := .venv/.ready
STAGE ?= 3

.PHONY: demo test test-slow test-zoo test-faults test-fuzz check verify bench clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/meanflow_digits.py --stage $(STAGE) --out demo

test: $(READY)
	$(BIN)/python -m pytest -q

# Every transform of every model of verify, and what else takes long: about an hour.
test-slow: $(READY)
	$(BIN)/python -m pytest -q -m "slow and not zoo and not faults"

# Checkpoints whose run is killed at every point of a save or a load, damaged ones, disks that refuse.
test-faults: $(READY)
	$(BIN)/python -m pytest -q -m "faults or not faults" tests/test_saving_faults.py

# Architectures of transformers, message passing, potentials: about an hour. Writes docs/zoo.md.
test-zoo: $(READY)
	$(BIN)/python -m pytest -q -m zoo tests/zoo
	PYTHONPATH=tests $(BIN)/python -m zoo.table

# Random programs against plain PyTorch for two hours. Writes the counts into docs/reliability.md.
test-fuzz: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz --seconds 7200 --from-seed $$(date +%s) --write

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/architecture.py --check

verify: $(READY)
	$(BIN)/zerofunc verify

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/train_step.py --rounds 8 --steps-per-round 2 --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/hvp.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/per_sample.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/checkpoint.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/attention.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/saving.py --write

# torch comes first and alone: what depends on it then takes the version that is there.
$(READY): pyproject.toml
	python3 -m venv .venv
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e '.[dev]'
	$(BIN)/pip install --no-deps curvlinops-for-pytorch==3.0.1  # it names torchvision, which would replace torch
	touch $@

clean:
	rm -rf .venv demo build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
