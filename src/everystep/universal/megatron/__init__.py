"""megatron: Megatron.

`source` reads Megatron-LM's files (`optimizer`: whose state is whose), `core_source` Megatron-Core's
distributed checkpoints; `target` writes Megatron-LM's (`target_ranks`: what each rank has).
"""
