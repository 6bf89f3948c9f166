"""`verify` for a recipe: with its model, its texts, its optimizer and its speed-ups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from composer.utils import dist
from torch.utils.data import DataLoader

from composer_speedups.errors import OutOfMemory, TaskError, is_out_of_memory
from composer_speedups.recipes import Recipe
from composer_speedups.tasks import build_task
from composer_speedups.tasks.objectives import OBJECTIVES
from composer_speedups.training.parts import available_algorithms, build_composer_model, build_optimizer
from composer_speedups.verification.findings import SAMPLES, Verification, with_fewer
from composer_speedups.verification.verify import verify

__all__ = ["verify_recipe"]


def verify_recipe(
    recipe: Recipe,
    *,
    samples: int = SAMPLES,
    seed: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Verification:
    """What `verify` finds of `recipe`.

    Args:
        recipe: a resolved recipe.
        samples: texts in the batch, of all ranks together.
        seed: of weights and masks; None takes the recipe's.
        say: is told what is being done.

    Raises:
        UserError: the recipe asks for what this machine or its data cannot give.
        OutOfMemory: with fewer texts to try.
    """
    seed = recipe.seed if seed is None else seed
    algorithms = available_algorithms(recipe)
    ranks = dist.get_world_size()
    if why := recipe.model_copy(update={"evaluate": False}).unshared_by(ranks):
        raise TaskError(why)
    micro = None
    # Of texts: parts of a batch are weighed by them here, and not by the tokens that some losses are a mean over.
    if recipe.accumulates and not OBJECTIVES[recipe.task.objective].of_tokens:
        micro = max(1, samples * (recipe.microbatch_size or 1) // recipe.batch_size)  # a rank's, as both are shared
    elif recipe.accumulates:
        say("leaving out microbatch_size, as a loss of tokens is compared of a whole batch")
    task = build_task(recipe.task, recipe.model, seed=seed, progress=say)
    try:
        return verify(
            build_composer_model(recipe, task, seed),
            DataLoader(task.train, collate_fn=task.collate_train, num_workers=recipe.workers),
            algorithms,
            partial(build_optimizer, recipe),
            samples=samples,
            microbatch_size=micro,
            say=say,
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        remedy = with_fewer(samples, ranks)
        raise OutOfMemory(f"{recipe.name} ran out of memory with {samples} texts: {remedy}") from error
