"""Files of a checkpoint, byte by byte: manifest, shard header, fragment geometry, checksums.

`docs/format.md` is the grammar. This layer turns records into bytes, and hostile bytes into errors. It opens
no files and knows no arrays.

| module | what it owns |
|---|---|
| `records` | what a manifest says: roots, parts, shards, leaves, fragments |
| `manifest` | roots and parts to bytes and back |
| `embedded` | a root inside of its shard's header, for a checkpoint that is one file |
| `validate` | what must hold in a root or a part beyond its types |
| `strict` | limits that are checked before JSON is decoded |
| `shard` | the header of a shard: safetensors, with our names and limits |
| `dtypes` | names of element types, their sizes, and how shards carry them |
| `geometry` | boxes of an array: where one lies inside of another |
| `checksums` | checksums as text |
"""
