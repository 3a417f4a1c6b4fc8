"""deepspeed: DeepSpeed.

`source` reads checkpoints of a training (`layout`: files, weights, optimizers, experts), `universal_source`
and `universal_target` its universal layout (`training`, `cuts`: a state in its terms). `names` is what both
it and `integrations.deepspeed` put into files.
"""
