"""A small encoder and its tokenizer in a folder, as `from_pretrained` reads it."""

from __future__ import annotations

from pathlib import Path

import transformers
from small import config_of
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ("pad", "unk", "cls", "sep", "mask")
WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "fish", "bird")  # all that it knows


def write_encoder(folder: Path, family: str = "Bert", auto: str = "Model", dropout: float = 0.0) -> str:
    """Write two layers with random weights into `folder`; return its path."""
    names = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL}
    words = [*names.values(), *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    options: dict = names | {"model_max_length": 60, "model_input_names": ["input_ids", "attention_mask"]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)
    values = dict(vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    values |= dict(intermediate_size=64, max_position_embeddings=64, pad_token_id=0, num_labels=1)
    config = config_of(family, **values, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    getattr(transformers, f"{family}{auto}")(config).save_pretrained(folder)
    return str(folder)
