"""dcp: ``torch.distributed.checkpoint``.

`source` and `target` are its directories (`directory`), `hf_source` its shards for Hugging Face. `record` is
DCP's metadata as a tree of ours, `values` objects that are not tensors; `integrations.dcp` uses both as well.
"""
