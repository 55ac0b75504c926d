"""Runs the scripts on DeepSpeed and on zerofunc at stages 0 to 3, and shows how far their losses are apart.

    python tests/deepspeed_scripts/compare.py --deepspeed-python ~/deepspeed-venv/bin/python

That interpreter needs deepspeed and the same torch; DeepSpeed runs on CPU with gloo there (``DS_ACCELERATOR=cpu``).
Without it, zerofunc's stages are compared with the losses kept in ``LAST_LOSSES``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
ADAM = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.01}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 5}}
CONFIGS = {
    "classifier": {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 1.0,
        "optimizer": ADAM,
        "scheduler": WARMUP,
    },
    "gpt": {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
    },
    "gan": {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.002, "betas": [0.5, 0.999]}},
    },
}
# Of DeepSpeed 0.19.8 and torch 2.13.0 on 2 ranks, at all stages but one: at stage 0 it refuses the GAN's loss, which
# goes through both engines.
LAST_LOSSES = {"classifier": 0.15890735387802124, "gpt": 2.678347110748291, "gan": 1.3522446155548096}


def losses(python, package, script, stage):
    """The losses that a script prints, step by step; None where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps({**CONFIGS[script], "zero_optimization": {"stage": stage}}))
        command = [
            python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", FOLDER / "run.py", package,
            FOLDER / f"{script}.py", "--deepspeed_config", config,
        ]  # fmt: skip
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    return [line["loss"] for line in lines] if done.returncode == 0 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with deepspeed")
    options = parser.parse_args()
    print(
        f"| script | stage | last loss | farthest from {'DeepSpeed' if options.deepspeed_python else 'its last loss'} |"
    )
    print("|---|---|---|---|")
    for script, last in LAST_LOSSES.items():
        for stage in range(4):
            found = losses(sys.executable, "zerofunc.compat.deepspeed", script, stage)
            if options.deepspeed_python:
                expected = losses(options.deepspeed_python, "deepspeed", script, stage)
            else:
                expected = [*found[:-1], last]
            far = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)) if expected else None
            shown = "DeepSpeed fails" if far is None else f"{far:.1e}"
            print(f"| {script} | {stage} | {found[-1]:.6f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
