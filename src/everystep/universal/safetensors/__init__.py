"""safetensors: single safetensors files, of any writer.

| module | what it owns |
|---|---|
| `source`, `target` | a file as leaves, and leaves as a file |
"""
