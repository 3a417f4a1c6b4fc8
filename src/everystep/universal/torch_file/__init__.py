"""torch_file: files of ``torch.save``.

Read without torch and without running code: `source`, `reading`, `leaves`, `values`; of pickles
`pickle_machine`, `pickle_classes`, `numpy_classes`; of archives `zip_reader`. Written: `target`,
`archive_writer`, `pickle_writer`, `zip_format`. `directories` has many such files.
Lightning's ``.ckpt`` is one, with entries of its own.
"""
