"""safetensors: single safetensors files.

`source` reads and `target` writes them; `header` says where tensors lie.
"""
