"""`holdfast drill`: a user's own training, killed again and again, and held against an undisturbed one.

`drill` is the order of events. `aim` chooses the moments, `child` starts and kills the script, `diary` reads
what its Checkpointer wrote down, `judge` compares, `causes` knows what usually explains a difference, and
`report` is what comes out.
"""
