"""The memory suite: the published ladder of Hugging Face's guide, and its figures in tables."""

from __future__ import annotations

import pytest
from study_row import study_row

from composer_speedups.ablation.tables import cell, csv_table
from composer_speedups.errors import RecipeError
from composer_speedups.recipes import load_recipe
from composer_speedups.recipes.suites import load_suite

ACCUMULATED, CHECKPOINTED = 1, {"gradient_checkpointing": {}}
FP16, EIGHT = {"mixed_precision": {"dtype": "fp16"}}, {"adamw_8bit": {"embeddings_32bit": False}}
# Samples/s, MB, microbatch, speed-ups beyond true fp32.
TABLE = {
    "memory/fp32": (8.86, 14949, None, {}),
    "memory/accumulation": (7.75, 8681, 1, {}),
    "memory/checkpointing": (5.99, 6775, 1, CHECKPOINTED),
    "memory/fp16": (18.64, 13939, None, FP16),
    "memory/fp16_all": (10.09, 7275, 1, CHECKPOINTED | FP16),
    "memory/adafactor": (7.96, 12295, None, {"adafactor": {}}),
    "memory/adafactor_all": (9.06, 4847, 1, CHECKPOINTED | FP16 | {"adafactor": {}}),
    "memory/adamw_8bit": (9.15, 13085, None, EIGHT),
    "memory/adamw_8bit_all": (10.35, 5363, 1, CHECKPOINTED | FP16 | EIGHT),
}


@pytest.mark.parametrize("name", TABLE)
def test_reproduces_the_published_table(name: str) -> None:
    samples, megabytes, microbatch, speedups = TABLE[name]
    recipe = load_recipe(name, check_arguments=False)
    figures = recipe.published
    assert figures is not None and figures.hardware == "V100 16 GB" and figures.source
    assert (figures.samples_per_second, figures.memory_mb) == (samples, megabytes)
    assert (recipe.batch_size, recipe.microbatch_size, recipe.learning_rate) == (4, microbatch, 5e-5)
    assert recipe.speedups == {"matmul_precision": {"precision": "highest"}} | speedups
    task = recipe.task
    assert (task.name, task.max_length, task.train_samples, task.num_labels) == ("dummy", 512, 512, 2)
    assert (task.lowest_token, task.vocabulary, task.mean_length) == (100, 30000, None), "ids 100 to 30,000, no padding"
    assert recipe.model.name == "bert-large-uncased"


def test_the_suite_is_the_table_and_what_is_beyond() -> None:
    for hardware in ("cuda", "cpu"):
        suite = load_suite("memory", hardware, check_arguments=False)
        assert [r.name for r in suite.recipes] == [*TABLE, "memory/gradient_release", "memory/leanest"]
        assert suite.baseline == "memory/fp32"
        assert {r.batch_size for r in suite.recipes} == {4}, "memory is compared at the same batch"
    assert {r.model.pretrained for r in suite.recipes} == {False}, "on a CPU nothing is downloaded"
    assert {r.duration for r in suite.recipes} == {"6ba"}


def test_published_memory_is_checked_and_shown() -> None:
    with pytest.raises(RecipeError, match=r"published.memory_mb must be a positive number, got -1"):
        load_recipe("memory/fp32", ["published.memory_mb=-1"], check_arguments=False)
    row = study_row("memory/fp32", published={"samples_per_second": 8.86, "memory_mb": 14949})
    assert cell(row, "published") == "8.86/s, 14,949 MB"
    header, values = (line.split(",") for line in csv_table([row]).splitlines())
    assert dict(zip(header, values, strict=True))["published_memory_mb"] == "14949"
