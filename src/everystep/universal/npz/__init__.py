"""npz: files of ``numpy.savez``.

`source` reads them.
"""
