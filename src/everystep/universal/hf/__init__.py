"""hf: Hugging Face directories, with weights of transformers and checkpoints of its Trainer.

| module | what it owns |
|---|---|
| `source`, `target` | the weights in one file or in shards, as ``from_pretrained`` opens them |
| `names` | where a model of transformers begins in the names of parameters |
| `trainer` | directories ``checkpoint-N``; `torch_file.source` calls it |
"""
