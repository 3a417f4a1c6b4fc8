"""torch_file: files of ``torch.save``, read and written without torch and without running code.

Lightning's ``.ckpt`` is one, with entries of its own. Archives and pickles of other systems (DCP, DeepSpeed,
Megatron, a Trainer) are read and written here, too.

| module | what it owns |
|---|---|
| `source`, `target` | a file as a state, arranged as a training or not; a state as a file |
| `reading`, `leaves` | the object in a file with a `StoredTensor` for each tensor; these as leaves |
| `pickle_machine` | the unpickler that imports and calls nothing |
| `pickle_classes`, `numpy_classes`, `torch_values` | what names in pickles mean |
| `zip_reader` | where the records of an archive lie |
| `writing` | many files at once, from leaves: in parallel, in bounded memory, synced |
| `pickle_writer`, `zip_writer` | pickles and archives as torch writes them |
"""
