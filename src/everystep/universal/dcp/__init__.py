"""dcp: directories of ``torch.distributed.checkpoint``.

Reading needs no torch; what runs inside of torch's planner and storage is in `integrations.dcp`, which uses
`record` and `plain_values`, too.

| module | what it owns |
|---|---|
| `source`, `target` | a directory as a state, and a state as a directory |
| `directory` | the files and the metadata of a directory |
| `hf_source` | shards that DCP wrote for Hugging Face |
| `record` | DCP's metadata as a tree of ours |
| `plain_values` | objects that are not tensors |
"""
