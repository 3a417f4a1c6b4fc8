"""hdf5: HDF5 files.

`source` reads any, and those of Keras (``.h5``, ``.weights.h5``, ``.keras``).
"""
