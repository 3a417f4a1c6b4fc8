"""Files of a checkpoint, byte by byte: manifest, shard header, fragment geometry, checksums.

`docs/format.md` is the grammar; the modules are `manifest`, `shard`, `geometry`, `dtypes` and `checksums`.
This layer turns records into bytes, and hostile bytes into errors. It opens no files and knows no arrays.
"""
