"""hf: Hugging Face.

`source` and `target` are directories of ``from_pretrained``, `trainer` a Trainer's ``checkpoint-N``, `names`
what parameters are called in models of transformers.
"""
