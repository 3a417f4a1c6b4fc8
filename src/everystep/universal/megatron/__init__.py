"""megatron: Megatron-LM's directories of ranks, and Megatron-Core's distributed checkpoints.

| module | what it owns |
|---|---|
| `source` | reads Megatron-LM's files |
| `optimizer` | which parameter each number of an optimizer's state means |
| `core_source` | reads Megatron-Core's distributed checkpoints, which are DCP's |
| `target`, `target_ranks` | writes Megatron-LM's files; what the file of each rank has |
"""
