from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from composer_speedups.tasks import ModelSpec, TaskSpec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "imbd"}, "docstrings"),
        ({"max_length": "256"}, "valid integer"),
        ({"max_length": True}, "valid integer"),
        ({"max_length": -1}, "greater than or equal to 8"),
        ({"train_samples": 0}, "greater than or equal to 1"),
        ({"mlm_probability": 1.0}, "less than 1"),
        ({"lenght": 3}, "Extra inputs"),
        ({"name": "text"}, "needs path"),
        ({"path": "x.csv"}, "belongs to task text, hub or imdb, not to docstrings"),
        ({"mean_length": 40.0}, "belongs to task dummy"),
        ({"name": "dummy", "mean_length": 300.0}, "exceeds max_length 256"),
        ({"name": "dummy", "length_std": 3.0}, "needs mean_length"),
        ({"name": "dummy", "mean_length": 40.0, "length_std": float("inf")}, "finite number"),
        ({"pad_to_multiple_of": 100}, "no multiple"),
        ({"name": "text", "path": "a", "eval_path": "b", "split_column": "c"}, "keep one"),
        ({"name": "text", "path": "a", "text_column": "label"}, "both 'label': one column cannot be both"),
    ],
)
def test_refuses_a_bad_task(values: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        TaskSpec(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": ""}, "at least 1 character"),
        ({"pretrained": "yes"}, "auto"),
        ({"config": {"trust_remote_code": True}}, "cannot be set"),
        ({"config": {"auto_map": "x"}}, "cannot be set"),
        ({"config": {"_attn_implementation": "x"}}, "cannot be set"),
        ({"config": {"id2label": {"0": "a"}}}, "config.id2label"),
        ({"trust_remote_code": True}, "Extra inputs"),
        ({"attn_implementation": "flash"}, "sdpa"),
    ],
)
def test_refuses_a_bad_model(values: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        ModelSpec(**values)


def test_specs_are_frozen_and_survive_json():
    spec = TaskSpec(name="text", path="x.csv", padding="longest", pad_to_multiple_of=8)
    with pytest.raises(ValidationError, match="frozen"):
        spec.max_length = 3
    assert TaskSpec.model_validate_json(spec.model_dump_json()) == spec
    model = ModelSpec(config={"num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "use_cache": False})
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model


def test_reading_a_spec_loads_nothing_heavy():
    code = (
        "import sys, composer_speedups.tasks as t; t.TaskSpec(); t.ModelSpec();"
        "print([m for m in ('torch', 'transformers', 'composer', 'datasets', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_building_a_task_does_not_load_composer():
    code = "import sys, composer_speedups.tasks.task, composer_speedups.tasks.models; print('composer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
