"""How DeepSpeed lays out its checkpoints; `everystep.universal.deepspeed.source` is the reader made of it.

- `files`: the names of files, which ranks they are of, and their content
- `everystep_files`: those that `everystep.integrations.deepspeed` wrote, which are Everystep checkpoints
- `optimizer_files` (ZeRO-1, 2 and 3), `unsharded` (no ZeRO): the optimizer state of a model-parallel rank
- `weights`: the model, from model files, layer files of a pipeline and files of experts
- `experts`: which rank holds which experts
- `joined`: whole leaves of all ranks, by the rules of a spec
"""
