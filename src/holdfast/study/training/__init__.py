"""What a checkpoint after every step costs a training, beside the alternatives (`holdfast bench --training`).

`training` is the whole run. `model` is what is trained, `arms` and `peers` the ways to checkpoint it,
`measure` the rounds in which they take turns, `sweep` what happens beyond the bandwidth of the device,
`recovery` and `child` the time from a kill to the next step. `results` holds what was found, `bars` the
promises held against it, `report` and `plot` show it.
"""
