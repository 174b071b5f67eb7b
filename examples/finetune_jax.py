"""Post-training in JAX, under Orbax, with delta checkpoints: supervised fine-tuning, LoRA or reinforcement learning. Run it again and it goes on.

python examples/finetune_jax.py FOLDER --task sft --steps 30
python examples/finetune_jax.py FOLDER --task sft --steps 60    # goes on from step 30
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from deltacheck import Policy
from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager
from deltacheck.demo.workloads import jax_workloads
from deltacheck.demo.workloads.recipe import TASKS, recipe, tiny

POLICIES = {"exact": Policy.exact, "model-exact": Policy.model_exact}

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("folder", type=Path, nargs="?", help="of the checkpoints (default: a new temporary one)")
arguments.add_argument("--task", choices=TASKS, default="sft")
arguments.add_argument(
    "--policy", choices=POLICIES, default="exact", help="what they promise: everything bit for bit, or the weights"
)
arguments.add_argument("--steps", type=int, default=30)
arguments.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
arguments.add_argument("--pretrain-steps", type=int, help="before post-training; fewer: sooner, from weights nearer to noise")
arguments.add_argument("--seed", type=int, default=1)
arguments.add_argument("--tiny", action="store_true", help="a model too small to say anything, in seconds")
options = arguments.parse_args()

changes = {"seed": options.seed} | ({} if options.pretrain_steps is None else {"pretrain_steps": options.pretrain_steps})
chosen = (tiny if options.tiny else recipe)(options.task, **changes)
folder = options.folder or Path(tempfile.mkdtemp(prefix="deltacheck-finetune-"))

with manager(folder.resolve(), policy=POLICIES[options.policy]()) as checkpoints:
    done = checkpoints.latest_step()
    if done is not None:
        run = jax_workloads.Workload(chosen)
        run.load(checkpoints.restore(done, args=DeltaRestoreArgs(run.state())))  # the target tells which types to build
        print(f"resumed from step {run.step}")
    else:
        began = time.perf_counter()
        run = jax_workloads.Workload(chosen, jax_workloads.pretrained(chosen))
        print(f"pre-trained for {chosen.pretrain_steps} steps in {time.perf_counter() - began:.0f} s, checkpoints in {folder}")

    while run.step < options.steps:
        loss = run.train_step()
        if run.step % options.every == 0 or run.step == options.steps:
            checkpoints.save(run.step, args=DeltaSaveArgs(run.state(), metrics={"loss": loss}))  # goes on in the background
            print(f"step {run.step}: loss {loss:.6f}, held-out {run.evaluate():.6f}")
# Leaving the block waits for the last save.
