"""Sentence Transformers' own Trainer, in float32, in bf16, and in bf16 with speed-ups applied before it is made.

    python measure.py MODEL OUT.jsonl          # five interleaved repetitions, each run in a process of its own
    python measure.py MODEL --check            # float64, no dropout: embeddings and gradients with and without them

Pairs of a docstring's first sentence and what follows it, MultipleNegativesRankingLoss, batch 32, texts cut at 128
tokens, torch's fused AdamW. The last eight steps of twelve count; ratios within a repetition, medians of five.
"""

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

BATCH, STEPS, COUNTED, REPETITIONS = 32, 12, 8, 5
ENTRIES = {
    "float32": "its Trainer in float32",
    "bf16": "the same in bf16",
    "ours": "bf16, unpadding, fast_dropout, fused_dropout_add_norm, fused_bias_gelu",
}


def pairs(seed: int) -> list[tuple[str, str]]:
    from composer_speedups.tasks.docstrings import collect

    found = []
    for text in collect(3000, 10).train:
        first, _, rest = re.sub(r"\s+", " ", text).partition(". ")
        if len(first.split()) >= 4 and len(rest.split()) >= 12:
            found.append((first, rest))
    random.Random(seed).shuffle(found)
    return found[: BATCH * STEPS]


def load(path: str):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(path, device="cpu")
    model.max_seq_length = 128
    return model


def speed_up(model) -> dict[str, int]:
    import composer_speedups as cs

    return {
        "unpadding": cs.apply_unpadding(model),
        "fused_dropout_add_norm": cs.apply_fused_dropout_add_norm(model),
        "fused_bias_gelu": cs.apply_fused_bias_gelu(model),
        "fast_dropout": cs.apply_fast_dropout(model),
    }


def run(path: str, entry: str, seed: int) -> dict:
    import torch
    import transformers
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    class Clock(transformers.TrainerCallback):
        ends: list[float] = []

        def on_step_end(self, *args, **kwargs):
            self.ends.append(time.perf_counter())

    rows = pairs(seed)
    data = Dataset.from_dict({"anchor": [a for a, _ in rows], "positive": [b for _, b in rows]})
    torch.manual_seed(seed)
    model = load(path)
    changed = speed_up(model) if entry == "ours" else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=BATCH, learning_rate=5e-5,
            optim="adamw_torch_fused",
            bf16=entry != "float32", use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, seed=seed,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = SentenceTransformerTrainer(
            model, arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model), callbacks=[Clock()]
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    seconds = Clock.ends[-1] - Clock.ends[-1 - COUNTED]
    speed = BATCH * COUNTED / seconds
    return {"entry": entry, "seed": seed, "pairs_per_second": speed, "losses": losses, "changed": changed}


def check(path: str) -> None:
    import torch
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    rows = pairs(0)[:16]
    found = []
    for ours in (False, True):
        model = load(path).double().train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
        if ours:
            print(speed_up(model))
        features = [model.preprocess([row[column] for row in rows]) for column in (0, 1)]
        loss = MultipleNegativesRankingLoss(model)(features, None)
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (loss, plain), (other, fast) = found
    assert plain.keys() == fast.keys()
    print(f"loss {loss.item():.6f}, off by {abs(loss - other).item():.1e}")
    total = torch.stack([g.norm() for g in plain.values()]).norm()
    off = torch.stack([(plain[n] - fast[n]).norm() for n in plain]).norm()
    print(f"gradients of {len(plain)} parameters off by {(off / total).item():.1e} of their norm")


def main() -> None:
    path, to, *rest = sys.argv[1:]
    if to == "--check":
        return check(path)
    if rest:
        print(json.dumps(run(path, rest[0], int(rest[1]))))
        return None
    done = []
    for seed in range(REPETITIONS):
        for entry in ENTRIES:
            command = [sys.executable, __file__, path, to, entry, str(seed)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            row = json.loads(said.splitlines()[-1])
            done.append(row)
            speed, loss = row["pairs_per_second"], row["losses"][-1]
            print(f"{entry}, seed {seed}: {speed:.1f} pairs/s, losses to {loss:.3f}", flush=True)
            with open(to, "a") as file:
                file.write(json.dumps(row) + "\n")
    speeds = {e: [row["pairs_per_second"] for row in done if row["entry"] == e] for e in ENTRIES}
    print("| | pairs/s | against float32 | ours against it |\n|---|---:|---:|---:|")
    for entry, words in ENTRIES.items():
        ratios = [b / a for a, b in zip(speeds["float32"], speeds[entry], strict=True)]
        gains = [b / a for a, b in zip(speeds[entry], speeds["ours"], strict=True)]
        cells = [spread(values, digits) for values, digits in ((speeds[entry], 1), (ratios, 2), (gains, 2))]
        print(f"| {words} | " + " | ".join(cells) + " |")


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
