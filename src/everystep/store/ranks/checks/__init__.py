"""checks: whether what ranks hold can be stored as one state.

`views` is what each rank sees of the state; `values` compares plain values and structures, `replicas` copies
of arrays, `layouts` copies of one array in different layouts.
"""
