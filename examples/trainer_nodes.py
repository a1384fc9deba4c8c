"""Two nodes in the Trainer of Transformers; stopped at any moment, the same command goes on to the same bits.

torchrun --nproc-per-node 2 examples/trainer_nodes.py runs/trainer
"""

from __future__ import annotations

import hashlib
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tailopt
from tailopt.integrations.transformers import NestedCallback, connect

STEPS, LOCAL_STEPS = 60, 5


def main(folder: str) -> None:
    node = connect()  # before TrainingArguments: Trainer then sees one process, and leaves the model unwrapped
    arguments = TrainingArguments(
        output_dir=f"{folder}/node-{node}",  # Trainer's own checkpoints: a folder for every node
        max_steps=STEPS,  # the same on all nodes
        save_steps=3,  # also in the middle of a round
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0,  # Trainer would clip the norm before BiClip clips coordinates
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(arguments.device)
    rows = torch.randint(0, 16, (64, 8), generator=torch.Generator().manual_seed(node))  # different data on every node
    optimizer = tailopt.NestedOptimizer(
        tailopt.BiClip(model.named_parameters(), lr=0.02, u=0.05, d=0.001),
        outer="nesterov",
        outer_settings={"olr": 0.7, "momentum": 0.5},
        local_steps=LOCAL_STEPS,
        model=model,
        run=f"{folder}/nodes",  # what the nodes keep together, in a folder that all of them share
        resume=True,  # begins where there is nothing yet
        checkpoint_every=None,  # a checkpoint of the nodes follows every checkpoint of Trainer
    )
    nested = NestedCallback(optimizer)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[nested])
    print(f"node {node} begins after {nested.resume_from}", flush=True)
    trainer.train(resume_from_checkpoint=nested.resume_from)
    weights = torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()]).numpy().tobytes()
    print(f"node {node}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
