"""transformers loads what we write, and we what it writes: a small model with tied weights."""

from __future__ import annotations

import pytest

import shardkeep

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def model(seed):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def same(one, other):
    theirs = other.state_dict()
    assert one.state_dict().keys() == theirs.keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_from_pretrained_loads_what_we_wrote(tmp_path, size):
    made = model(1)
    made.config.save_pretrained(tmp_path / "x")
    writer = shardkeep.HuggingFaceWriter(max_shard_size=size)
    shardkeep.save(made.state_dict(), tmp_path / "x", storage_writer=writer, no_dist=True)
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "x", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    same(made, loaded)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_we_load_what_save_pretrained_wrote(tmp_path, size):
    made, target = model(1), model(2)
    made.save_pretrained(tmp_path / "x", max_shard_size=size)
    state = target.state_dict()
    # It stores one of the tied names, and does not say which other stands for it.
    shardkeep.load(state, tmp_path / "x", optional=["lm_head.weight"], no_dist=True)
    same(made, target)
