"""npz: files of ``numpy.savez``.

| module | what it owns |
|---|---|
| `source` | reads them |
"""
