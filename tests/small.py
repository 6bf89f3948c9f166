"""Small models and batches that many tests use."""

from __future__ import annotations

import pytest
import torch


def bert_config(**changes: object):
    from transformers import BertConfig

    values: dict[str, object] = dict(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertConfig(**(values | changes))


def config_of(family: str, **values: object):
    """The configuration of `family`, such as "Roberta", with `values` by BERT's names."""
    import transformers

    if family == "DistilBert":
        others = {
            "intermediate_size": "hidden_dim",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        }
        values = {others.get(name, name): value for name, value in values.items()}
        values |= {"seq_classif_dropout": 0.0, "qa_dropout": 0.0}
    elif family == "ModernBert":  # its second layer sees a window of 4 tokens to each side
        values["mlp_dropout"] = values["embedding_dropout"] = values.pop("hidden_dropout_prob")
        values["attention_dropout"] = values.pop("attention_probs_dropout_prob")
        special = dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 1)
        values = {"local_attention": 8, "global_attn_every_n_layers": 2} | special | values
    elif family == "DebertaV2":  # as v3, with buckets so small that far tokens share one
        own = dict(type_vocab_size=0, position_biased_input=False, position_buckets=4, norm_rel_ebd="layer_norm")
        own |= dict(relative_attention=True, pos_att_type=["p2c", "c2p"], share_att_key=True, pooler_dropout=0.0)
        values = own | values
    elif family == "Albert":  # each layer of weights of its own
        own = dict(num_hidden_groups=values["num_hidden_layers"], classifier_dropout_prob=0.0)
        values = own | values
    elif family in ("NomicBert", "JinaEmbeddingsV3", "Gte"):
        own = dict(classifier_dropout=0.0, head_dim=values["hidden_size"] // values["num_attention_heads"])
        values = own | values
    elif family == "EuroBert":  # two heads share keys and values
        values["attention_dropout"] = values.pop("attention_probs_dropout_prob")
        values.pop("hidden_dropout_prob")  # it has no other
        heads = values["num_attention_heads"]
        own = dict(num_key_value_heads=heads // 2, head_dim=values["hidden_size"] // heads, classifier_pooling="bos")
        special = dict(bos_token_id=1, eos_token_id=2, mask_token_id=4)
        values = own | special | values
    elif family == "Esm":  # as ESM-2
        # Queries are scaled before they are turned, which transformers 5 does in float32, and by us with the scores: in
        # float64 the same numbers where the scale is a power of two, 1/4, so that nothing is seen of float32 roundings
        own = dict(position_embedding_type="rotary", token_dropout=True, mask_token_id=4)
        values = own | values | {"num_attention_heads": values["hidden_size"] // 16}
    return getattr(transformers, f"{family}Config")(**values)


def stock_checkpointing(model: torch.nn.Module, reentrant: bool = False) -> None:
    """What transformers has of its own, by the name that the installed version has for it."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": reentrant})


def checkpoint_blocks(model: torch.nn.Module, reentrant: bool) -> None:
    """Let `model` compute its blocks again in backward: as transformers does it, or as ours where that does not."""
    from composer_speedups import apply_gradient_checkpointing

    if model.supports_gradient_checkpointing:
        stock_checkpointing(model, reentrant)
    elif reentrant:
        pytest.skip("transformers has no gradient checkpointing for this family, and ours is not reentrant")
    else:
        assert apply_gradient_checkpointing(model) > 0


class Doubled:
    """Mixed into a module of transformers: a user's `forward` around the stock one, which must not be worked around."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            return out * 2
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else type(out)(last_hidden_state=out[0] * 2)


def padded_batch(
    rows: int = 6, length: int = 16, vocabulary: int = 128, labels: int = 3, seed: int = 5
) -> dict[str, torch.Tensor]:
    """Token ids with a padding mask (rows of different lengths) and labels; the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (rows,), generator=random)
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    ids = torch.randint(5, vocabulary, (rows, length), generator=random) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.randint(0, labels, (rows,), generator=random),
    }


class BatchDataset(torch.utils.data.Dataset):
    """`rows` examples of `padded_batch`, one dict each; the same examples whenever it is made."""

    def __init__(self, rows: int = 32, length: int = 16) -> None:
        self.data = padded_batch(rows, length)

    def __len__(self) -> int:
        return len(self.data["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.data.items()}
