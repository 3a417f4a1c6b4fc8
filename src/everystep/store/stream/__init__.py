"""stream: the bytes of many leaves, through bounded memory.

| module | what it owns |
|---|---|
| `leaf_windows` | the bytes of leaves, a bounded window at a time |
| `leaf_stream` | the bytes of many leaves in the order in which a writer asks for them |
| `element_casts` | elements from one type to another |
| `safetensors_writer` | one safetensors file out of leaves, synced |
| `progress` | how a long function says how far it is |

It reads open checkpoints and writes files of other systems. It never commits, and knows no ranks.
"""
