"""deepspeed: DeepSpeed's checkpoints, and its universal layout.

Nothing here imports DeepSpeed or torch; what a running engine needs is in `integrations.deepspeed`.

| module | what it owns |
|---|---|
| `names` | what DeepSpeed calls its files, their entries and its classes; only here |
| `plain_objects` | its objects as plain values, and back |
| `source` | reads checkpoints of a training: ZeRO 0 to 3, with tensor, pipeline and expert parallelism |
| `files` | the files of a tag: whose they are, and what a model file has |
| `everystep_files` | files that `integrations.deepspeed` wrote, which are Everystep checkpoints |
| `weights` | the model, from model files, layer files of a pipeline and files of experts |
| `optimizer_files`, `unsharded` | the optimizer state of a model-parallel rank, with ZeRO and without |
| `experts` | which rank holds which experts |
| `universal_source`, `universal_target` | read and write the universal layout |
| `universal_training`, `parameter_fields` | a training state, and how ranks cut parameters, in its terms |
"""
