"""hdf5: HDF5 files, and those of Keras.

| module | what it owns |
|---|---|
| `source` | reads them with h5py |
"""
